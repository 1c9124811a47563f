"""Statements about a failing run, as every format prints them in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "strong", "bad", "good", "quiet"]


@dataclass(frozen=True, slots=True)
class PageRow:
    """One statement about a failing run."""

    label: str
    text: str
    tone: Tone = ""
    is_code: bool = False
    is_detail: bool = False
    """Whether it belongs to the row above."""


@dataclass(frozen=True, slots=True)
class Section:
    """Statements about one question."""

    title: str
    rows: tuple[PageRow, ...]
