"""The faces between what is measured and the loop that measures: a subject, and a runner for each of its modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from piecegraph.bench.config import Cell
from piecegraph.bench.result import Fallback, Mode, Phase, Verdict


class UnavailableError(Exception):
    """A mode that is not to be had here; the text says why."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Of what a runner has run until now, in one phase."""

    num_steps: int = 0
    num_replays: int = 0
    num_tokens: int = 0
    num_padding: int = 0

    def since(self, before: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(before, name) for name in Counts.__slots__))

    @property
    def coverage(self) -> float | None:
        return self.num_replays / self.num_steps if self.num_steps else None

    @property
    def padding(self) -> float | None:
        num_rows = self.num_tokens + self.num_padding
        return self.num_padding / num_rows if num_rows else None


class Runner(Protocol):
    """A model that is ready to run in one mode."""

    mode: Mode
    ran_as: str
    stages_s: dict[str, float]
    weight_bytes: int
    """Of weights that it shares with another runner: they were there before it."""

    def sample_s(self, phase: Phase, inputs: Any) -> float:
        """Seconds of one prefill, of one step of decoding, or of one call."""

    def counts(self, phase: Phase) -> Counts:
        """What it has run; all zero where piecegraph does not run."""

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """What was lost until now."""

    def close(self) -> None:
        """Give back its memory."""


class Subject(Protocol):
    """A model to be run in several modes."""

    phases: tuple[Phase, ...]

    @property
    def groups(self) -> tuple[tuple[Mode, ...], ...]:
        """The modes, in groups of those that are open at once and take turns."""

    def open(self, mode: Mode) -> Runner:
        """Make a model ready to run.

        Raises:
            UnavailableError: there is no such mode here.
        """

    def inputs(self, cell: Cell, number: int) -> Any:
        """Those of a round, the same for every mode."""

    def judge(self, runner: Any, cell: Cell) -> Mapping[Phase, Verdict]:
        """Compare the outputs of a mode with those of the reference."""

    def num_tokens(self, cell: Cell, phase: Phase) -> int:
        """Tokens of one sample."""

    def read_bytes(self, cell: Cell, phase: Phase) -> int:
        """Weights that one sample reads at least."""

    def close(self) -> None:
        """Give back what the modes share."""
