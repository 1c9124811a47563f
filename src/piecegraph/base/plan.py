"""The nouns: what the stages hand each other and what ``explain()`` prints.

Everything here is frozen and printable, holds no tensor, no graph and no callable, and imports nothing of the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from piecegraph.base.text import count_of

FrontendName = Literal["trace", "breakable"]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's Python."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice piecegraph made on the user's behalf, and why."""

    subject: str
    choice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.choice} ({self.reason})"


@dataclass(frozen=True, slots=True)
class SizeKey:
    """The value of every dynamic dimension: what a tape is recorded for.

    >>> str(SizeKey((8, 128))), str(SizeKey(()))
    ('8x128', 'static')
    """

    values: tuple[int, ...]

    def __str__(self) -> str:
        return "x".join(map(str, self.values)) or "static"

    @property
    def volume(self) -> int:
        """The product of the sizes: larger is recorded first."""
        total = 1
        for value in self.values:
            total *= value
        return total

    def covers(self, other: SizeKey) -> bool:
        """Whether an input of ``other`` can be padded to this size."""
        return all(mine >= theirs for mine, theirs in zip(self.values, other.values, strict=True))


@dataclass(frozen=True, slots=True)
class SizeDim:
    """One dynamic size and the input dimensions that carry it."""

    name: str
    carriers: tuple[tuple[str, int], ...]
    """(input, dimension) pairs that must agree."""

    def __str__(self) -> str:
        return f"{self.name}: " + " = ".join(f"{name}.shape[{dim}]" for name, dim in self.carriers)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of ops between two cuts: compiled, and captured as one graph for each size."""

    index: int
    num_ops: int
    key: str
    """Equal for pieces that are the same computation on other weights; each key is compiled once."""
    first: SourceLine | None
    backend: str

    def __str__(self) -> str:
        return f"piece {self.index}"


@dataclass(frozen=True, slots=True)
class Cut:
    """Ops that run eagerly between two graphs."""

    index: int
    op: str
    reason: str
    source: SourceLine | None

    def __str__(self) -> str:
        return f"cut {self.index} ({self.op})"


@dataclass(frozen=True, slots=True)
class Plan:
    """How one kind of call is run: the pieces and cuts in order, and every decision made."""

    name: str
    frontend: FrontendName
    device: str
    mode: str
    inputs: tuple[str, ...]
    size_dims: tuple[SizeDim, ...]
    steps: tuple[Piece | Cut, ...]
    decisions: tuple[Decision, ...]
    seconds: tuple[tuple[str, float], ...]
    """(stage, seconds) of building the plan."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(step for step in self.steps if isinstance(step, Piece))

    @property
    def cuts(self) -> tuple[Cut, ...]:
        return tuple(step for step in self.steps if isinstance(step, Cut))

    @property
    def num_distinct(self) -> int:
        return num_distinct(self.steps)


def num_distinct(steps: Sequence[Piece | Cut]) -> int:
    """How many different pieces there are. An empty key is that of a piece which was not looked at."""
    return len({step.key for step in steps if isinstance(step, Piece) and step.key})


def count_pieces(steps: Sequence[Piece | Cut]) -> str:
    """Pieces in words."""
    num_pieces = sum(isinstance(step, Piece) for step in steps)
    return f"{count_of(num_pieces, 'piece')}, {num_distinct(steps)} distinct (each compiled once)"
