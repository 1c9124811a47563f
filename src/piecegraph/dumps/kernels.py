"""What compiled pieces launch, and what their graphs hold, as text."""

from __future__ import annotations

from collections.abc import Sequence

from piecegraph.base.origin import LaunchCall
from piecegraph.graph.program import StepSource
from piecegraph.provenance.origins.fx import launch_calls
from piecegraph.tape.tape import GraphStep, Tape


def launched_lines(source: StepSource) -> tuple[str, ...]:
    """Each launch in the code that Inductor generated for a piece, with the lines of the model it computes."""
    calls = launch_calls(source)
    return tuple(f"`{call.op}`{_origins(call)}" for call in dict.fromkeys(calls.values()))


def captured_text(tapes: Sequence[Tape]) -> str:
    """Every kernel of every graph; empty if nothing was recorded with provenance."""
    lines: list[str] = []
    for tape in tapes:
        for step in tape.steps:
            if isinstance(step, GraphStep) and step.inside is not None:
                record = step.inside.record
                lines += ["", f"## {record.title} at {record.phase}", ""]
                for node in record.nodes:
                    call = record.calls[node.call] if node.call is not None else None
                    lines.append(f"- {node.kind} `{node.name}`" + (f" by `{call.op}`{_origins(call)}" if call else ""))
    return "\n".join(["# Kernels of the recorded graphs", *lines]) + "\n" if lines else ""


def _origins(call: LaunchCall) -> str:
    places = [f"{origin.op}" + (f" {origin.line}" if origin.line else "") for origin in call.origins]
    return f": {', '.join(places)}" if places else ""
