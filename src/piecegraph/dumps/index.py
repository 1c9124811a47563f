"""What a dump holds, as a page of Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from piecegraph.base.plan import Cut, Piece, count_pieces
from piecegraph.base.text import count_of, to_json


@dataclass(frozen=True, slots=True)
class DumpedPiece:
    """A distinct piece, and what was written of it."""

    index: int
    repro: str = ""
    """The file; empty if there is none."""
    why_no_repro: str = ""
    wrapper: str = ""
    """The file that Inductor's code runs from."""
    smallest: str = ""
    """The file with the smallest part of it that fails."""
    inputs: str = ""
    seconds: float = 0.0
    """Of compiling it."""
    input_bytes: int = 0
    """Weights included, in the call that was planned for."""
    kernels: tuple[str, ...] = ()
    """What its code launches, with ops and lines."""
    failure: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(file for file in (self.smallest, self.repro, self.wrapper, self.inputs) if file)


@dataclass(frozen=True, slots=True)
class DumpedSize:
    """A recorded size."""

    key: str
    graphs: int
    eager_steps: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class DumpedPlan:
    """All that is known when a page is written."""

    name: str
    steps: tuple[Piece | Cut, ...]
    pieces: Mapping[str, DumpedPiece]
    """By key."""
    sizes: tuple[DumpedSize, ...]
    seconds: Mapping[str, float]
    events: tuple[str, ...]
    files: tuple[str, ...]
    failure: str
    """What ended the making of the plan; empty if nothing did."""
    failed_step: int | None
    is_complete: bool
    """Whether the plan was made to its end."""
    why_untraced: str = ""
    """Why there is no graph, and so no pieces."""


def index_text(plan: DumpedPlan) -> str:
    """The page."""
    state = "complete" if plan.is_complete else "the plan was not made to its end"
    lines = [f"# {plan.name}", "", f"{_counts(plan)}; {state}."]
    if plan.failure:
        lines += ["", f"**FAILED**: {_short(plan.failure)}"]
    failed = [piece for piece in plan.pieces.values() if piece.failure]
    lines += [line for piece in failed for line in _failure_lines(piece)]
    lines += ["", "## Steps", "", *_table(_STEP_HEADER, [_step_row(step, plan) for step in plan.steps])]
    if plan.sizes:
        header = ("size", "graphs", "eager steps", "seconds", "MiB")
        lines += ["", "## Recorded sizes", "", *_table(header, [_size_row(size) for size in plan.sizes])]
    launched = [piece for piece in plan.pieces.values() if piece.kernels]
    if launched:
        lines += ["", "## Kernels"]
    for piece in launched:
        lines += ["", f"piece {piece.index}:", "", *(f"- {kernel}" for kernel in piece.kernels)]
    lines += ["", "## Seconds", "", ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in plan.seconds.items())]
    if plan.events:
        lines += ["", "## Fallbacks and other losses", "", *(f"- {_short(event)}" for event in plan.events)]
    lines += ["", "## Files", "", *(f"- [{name}]({name})" for name in plan.files)]
    return "\n".join(lines) + "\n"


def plan_json(plan: DumpedPlan) -> str:
    """The same for programs."""
    steps: list[dict[str, Any]] = []
    for step in plan.steps:
        kind = "piece" if isinstance(step, Piece) else "cut"
        steps.append({"kind": kind, **asdict(step), "failed": step.index == plan.failed_step})
    return to_json(
        {
            "name": plan.name,
            "complete": plan.is_complete,
            "failure": plan.failure,
            "steps": steps,
            "pieces": {key: asdict(piece) for key, piece in plan.pieces.items()},
            "sizes": [asdict(size) for size in plan.sizes],
            "seconds": dict(plan.seconds),
            "events": list(plan.events),
            "files": list(plan.files),
        }
    )


_MAX_TEXT = 400
_STEP_HEADER = ("#", "what", "ops", "line", "why, or compiled by", "seconds", "input MiB", "files")


def _counts(plan: DumpedPlan) -> str:
    if plan.why_untraced:
        return f"The function runs as it is, without a trace ({_cell(plan.why_untraced)}): there are no pieces"
    pieces = [step for step in plan.steps if isinstance(step, Piece)]
    cuts = count_of(len(plan.steps) - len(pieces), "cut")
    return f"{count_pieces(plan.steps)}, {cuts}"


def _failure_lines(piece: DumpedPiece) -> list[str]:
    files = ", ".join(f"[{file}]({file})" for file in piece.files)
    return ["", f"**FAILED piece {piece.index}**: {_short(piece.failure)}" + (f"; see {files}" if files else "")]


def _step_row(step: Piece | Cut, plan: DumpedPlan) -> tuple[str, ...]:
    if isinstance(step, Cut):
        mark = "**FAILED** " if step.index == plan.failed_step else ""
        return str(step.index), f"{mark}cut {step.op}", "", str(step.source or ""), step.reason, "", "", ""
    piece = plan.pieces.get(step.key)
    is_failed = step.index == plan.failed_step or bool(piece and piece.failure)
    what = f"{'**FAILED** ' if is_failed else ''}piece"
    common = (str(step.index), what, str(step.num_ops), str(step.first or ""))
    if piece is None:
        return *common, f"{step.backend}, for an earlier plan" if plan.is_complete else step.backend, "", "", ""
    if piece.index != step.index:
        return *common, f"{step.backend}, as piece {piece.index}", "", "", ""
    files = ", ".join(f"[{file}]({file})" for file in piece.files) or piece.why_no_repro
    return *common, step.backend, f"{piece.seconds:.2f}", f"{piece.input_bytes / 2**20:.3f}", files


def _size_row(size: DumpedSize) -> tuple[str, ...]:
    mib = f"{size.num_bytes / 2**20:.1f}"
    return size.key, str(size.graphs), str(size.eager_steps), f"{size.seconds:.3f}", mib


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(map(_cell, line)) + " |" for line in lines]


def _short(text: str) -> str:
    """The beginning of a text; all of it is in ``plan.json``."""
    line = _cell(text)
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]} ..."


def _cell(text: str) -> str:
    """On one line, and no border of a table."""
    return " ".join(text.split()).replace("|", "\\|")
