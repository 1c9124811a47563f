"""Columns of text that fit a terminal: long names are shortened first, then the least needed columns are left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

GAP = 2
"""Spaces between columns."""

Cut = Literal["never", "start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column and what may be done to it where there is no room."""

    title: str
    cells: tuple[str, ...]
    is_number: bool = False
    cut: Cut = "never"
    """Where its cells may be shortened. A path keeps its end, a size its beginning, a kernel's name both."""
    least: int = 0
    """How many characters must be left of a cell that is shortened."""
    leave: int = 0
    """Columns with 1 are left out first, then those with 2, and so on; those with 0 never."""

    @property
    def head(self) -> str:
        """The title; over numbers, which are short, a word a line."""
        return self.title.replace(" ", "\n") if self.is_number else self.title

    @property
    def width(self) -> int:
        return max(map(len, (*self.head.split("\n"), *self.cells)))


def fit(columns: list[Column], width: int) -> list[Column]:
    """The columns that have something to say, made to fit the width as far as they can be."""
    kept = [column for column in columns if any(column.cells) or not column.leave]
    while not _can_fit(kept, width) and any(column.leave for column in kept):
        kept.remove(min((column for column in kept if column.leave), key=lambda column: column.leave))
    widths = [column.width for column in kept]
    while sum(widths) + GAP * (len(kept) - 1) > width:
        cuttable = [
            index for index, column in enumerate(kept) if column.cut != "never" and widths[index] > _least(column)
        ]
        if not cuttable:
            break
        widths[max(cuttable, key=lambda index: widths[index])] -= 1
    return [
        replace(column, cells=tuple(shorten(cell, limit, column.cut) for cell in column.cells))
        for column, limit in zip(kept, widths, strict=True)
    ]


def shorten(text: str, width: int, cut: Cut) -> str:
    """The text in at most that many characters.

    >>> shorten("model.layers.*.self_attn.q_proj", 20, "start")
    '..*.self_attn.q_proj'
    >>> shorten("nvjet_sm90_tst_64x16_64x16_2x1_v_bz_splitK_TNT", 26, "middle")
    'nvjet_sm90_t..z_splitK_TNT'
    >>> shorten("mixed 4096 tokens of 1 sequence", 16, "end")
    'mixed 4096 tok..'
    """
    if len(text) <= width or cut == "never":
        return text
    if cut == "start":
        return ".." + text[len(text) - width + 2 :]
    if cut == "end":
        return text[: width - 2] + ".."
    head = (width - 2) // 2
    return text[:head] + ".." + text[len(text) - (width - 2 - head) :]


def _least(column: Column) -> int:
    return max(min(column.width, column.least), len(column.title))


def _can_fit(columns: list[Column], width: int) -> bool:
    least = sum(column.width if column.cut == "never" else _least(column) for column in columns)
    return least + GAP * (len(columns) - 1) <= width
