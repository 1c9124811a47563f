"""Plans and pieces in the log that ``TORCH_TRACE`` asks for, where tlparse shows them beside torch's own artifacts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.plan import Piece
from piecegraph.base.text import to_json
from piecegraph.dumps.listing import segment_name, split_text
from piecegraph.graph.program import Program
from piecegraph.graph.split import Segment
from piecegraph.graph.tracer import Traced


def trace_plan(name: str, traced: Traced, segments: Sequence[Segment], program: Program) -> None:
    """Tell of a plan: its steps, how it was cut, and the code of each distinct piece. Nothing is made of it unless
    somebody listens.
    """

    def tell(what: str, encoding: str, make: Callable[[], str]) -> None:
        torch_compat.trace_artifact(traced.owner, f"piecegraph_{what}", encoding, partial(_made_by, make))

    tell("plan", "json", lambda: _plan_json(name, program))
    tell("split", "string", lambda: split_text(traced, segments))
    seen: set[str] = set()
    for index, (segment, step) in enumerate(zip(segments, program.steps, strict=True)):
        if isinstance(step.label, Piece) and step.label.key not in seen:
            seen.add(step.label.key)
            tell(segment_name(index, segment), "string", partial(_code_of, step.source.module))


def _made_by(make: Callable[[], str]) -> str:
    """What is made; a log is not worth a run."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - graphs may hold anything
        return f"it cannot be written down: {type(error).__name__}: {error}"


def _code_of(module: torch.fx.GraphModule) -> str:
    return torch_compat.graph_code(module.graph).text


def _plan_json(name: str, program: Program) -> str:
    steps = [
        {"kind": "piece" if isinstance(step.label, Piece) else "cut", **asdict(step.label)} for step in program.steps
    ]
    return to_json({"name": name, "steps": steps})
