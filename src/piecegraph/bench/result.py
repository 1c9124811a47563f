"""The nouns of a benchmark's result, and the way to JSON and back.

The one invariant: a row has a time only if what it timed gave the outputs of the reference, or is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from piecegraph.base.json_schema import from_plain, object_schema
from piecegraph.base.plan import Decision
from piecegraph.base.text import to_json
from piecegraph.errors import NOTES, InputError

SCHEMA = 1
"""Raised when a field is renamed, removed or means something else; a further field does not raise it."""

Mode = Literal["eager", "compile", "reduce-overhead", "breakable", "piecewise", "full"]
Phase = Literal["prefill", "decode", "forward"]
"""``forward``: one call of a module that is no language model."""

Comparison = Literal["reference", "same", "differs", "not available", "failed"]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that a share of the values lies below, between two of them if need be.

    >>> quantile([4.0, 1.0, 2.0], 0.75)
    3.0
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (place - low) * (ordered[high] - ordered[low]), 9)


@dataclass(frozen=True, slots=True)
class Timing:
    """What repeated runs took."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    repeats: int

    def __str__(self) -> str:
        return f"{self.median_ms:.2f}"

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Timing:
        """Of single times.

        >>> Timing.of([3.0, 1.0, 2.0])
        Timing(median_ms=2.0, p10_ms=1.2, p90_ms=2.8, repeats=3)
        """
        median_ms, p10_ms, p90_ms = (quantile(times_ms, share) for share in (0.5, 0.1, 0.9))
        return cls(median_ms, p10_ms, p90_ms, len(times_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """Something that was lost while a mode ran."""

    code: str
    """One of docs/errors.md."""
    subject: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a mode gave the outputs of the reference, before anything was timed."""

    state: Comparison
    reason: str
    """By how much outputs differ and may differ; or why there is nothing to compare."""
    difference: float | None = None
    """Of rows of logits: by how much of their norm a share of them is off, the share that is closest to its limit."""
    allowed: float | None = None
    """That limit."""

    @property
    def is_timed(self) -> bool:
        return self.state in ("reference", "same")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What cannot be undercut by running the same kernels, or the same weights, in another way."""

    kernels_ms: float | None = None
    """The time in which kernels of one step are at work, measured; None without a GPU."""
    bandwidth_ms: float | None = None
    """The weights that a step reads, once, at the bandwidth of the device that was measured; None without a GPU."""
    ratio: float | None = None
    """The median over the larger of the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One mode at one size in one phase."""

    mode: Mode
    phase: Phase
    batch_size: int
    input_len: int
    output_len: int
    ran_as: str
    """What the mode was here, in words: ``direct: cpu has no graphs``."""
    verdict: Verdict
    timing: Timing | None = None
    """Of one prefill of the batch, of one step of decoding, or of one call. None: see the verdict."""
    tokens_s: float | None = None
    """Tokens a second: those of the prompts in a prefill, new ones in a step of decoding, rows of a call."""
    coverage: float | None = None
    """The share of steps that were replayed from graphs; None where piecegraph does not run."""
    padding: float | None = None
    """The share of rows that belong to no token."""
    memory_bytes: int | None = None
    """Of the device, at most, while it ran: weights, cache, graphs and what a step needs. None on a CPU."""
    floor: Floor = field(default_factory=Floor)
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def key(self) -> tuple[Mode, Phase, int, int, int]:
        """What makes two rows comparable."""
        return (self.mode, self.phase, self.batch_size, self.input_len, self.output_len)

    @property
    def loss(self) -> str:
        """Why it did not run as it was asked to; empty if it did."""
        if not self.verdict.is_timed:
            return f"{self.verdict.state}: {self.verdict.reason}"
        lost = [each for each in self.fallbacks if each.code not in NOTES]
        if lost:
            return f"{lost[0].code} {lost[0].subject}: {lost[0].reason}"
        return self.ran_as if self.ran_as.startswith("direct") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """What a mode took until it could be timed."""

    mode: Mode
    stages_s: dict[str, float]
    """Seconds of each stage, in their order; their sum is the time it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What figures were measured on."""

    fingerprint: str
    """Equal for machines on which figures can be compared: a digest of all below."""
    device: str
    num_threads: int
    num_ranks: int
    environment: dict[str, str]
    """Versions, as ``piecegraph env`` prints them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Everything that ``piecegraph bench MODEL`` tells."""

    kind: Literal["bench"] = "bench"
    schema: int = SCHEMA
    created: str
    """When, in UTC: ``2026-11-16T12:00:00Z``."""
    model: str
    machine: Machine
    config: tuple[Decision, ...]
    """What was asked for and what was left to us, resolved, with reasons."""
    startup: tuple[Startup, ...]
    rows: tuple[Row, ...]

    @property
    def losses(self) -> tuple[str, ...]:
        """What did not run as it was asked to, each told once."""
        return tuple(dict.fromkeys(f"{row.mode}: {row.loss}" for row in self.rows if row.loss))

    def to_json(self) -> str:
        """One document, which keeps :func:`result_schema`."""
        return to_json(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchResult:
        """The same again.

        Raises:
            ValueError: it is not such a document.
        """
        document: Any = json.loads(text)
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema!r}, not {SCHEMA}")
        return from_plain(cls, document)


def result_schema() -> dict[str, Any]:
    """The JSON schema of a result, which docs/bench.schema.json holds."""
    definitions: dict[str, Any] = {}
    found = object_schema(BenchResult, definitions)
    found["properties"]["schema"] = {"const": SCHEMA}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a result of piecegraph bench",
        **found,
        "$defs": definitions,
    }


def read_result(path: Path) -> BenchResult:
    """What a run has saved.

    Raises:
        InputError: there is no such file, or it is something else.
    """
    try:
        return BenchResult.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("PG601", f"{path} cannot be read", why=(error.strerror or str(error)).lower()) from error
    except ValueError as error:
        hint = "give a file that piecegraph bench MODEL -o FILE.json wrote"
        raise InputError("PG604", f"{path} is no result of a benchmark", why=str(error), hint=hint) from error
