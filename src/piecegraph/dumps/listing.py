"""A traced graph, and the pieces and cuts that were made of it, as Python to read."""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx

from piecegraph.base import torch_compat
from piecegraph.graph.fx_nodes import op_name
from piecegraph.graph.sources import FromCall, FromSize, GraphInput, Weight
from piecegraph.graph.split import Segment
from piecegraph.graph.tracer import Traced

_INDENT = "    "


def traced_text(traced: Traced) -> str:
    """The whole graph, and where each of its inputs comes from."""
    lines = ['"""The function as it was traced: one graph, before it was cut.', ""]
    lines += [f"{_INDENT}{node.name}: {_source_text(source, traced)}" for node, source in traced.inputs.items()]
    return "\n".join([*lines, '"""', "", torch_compat.graph_code(traced.graph).text])


def split_text(traced: Traced, segments: Sequence[Segment]) -> str:
    """Every piece and cut as a function, and the function that calls them one after the other."""
    parts = ['"""The function as it was cut: pieces are compiled and captured, cuts run between their graphs."""']
    calls: list[str] = []
    for index, segment in enumerate(segments):
        name = segment_name(index, segment)
        code = torch_compat.graph_code(segment.module.graph).text
        parts.append(f"{_comment(segment)}\n{code.replace('def forward(', f'def {name}(', 1).rstrip()}")
        given = ", ".join(["self", *(_input_text(source) for source in segment.inputs)])
        results = "".join(f"{node.name}, " for node in segment.outputs).rstrip()
        calls.append(f"{_INDENT}{results + ' = ' if results else ''}{name}({given})")
    inputs = ", ".join(["self", *(node.name for node in traced.inputs)])
    returned = "".join(f"{node.name}, " for node in traced.output_nodes).rstrip()
    parts.append("\n".join([f"def forward({inputs}):", *calls, f"{_INDENT}return ({returned})"]))
    return "\n\n\n".join(parts) + "\n"


def segment_name(index: int, segment: Segment) -> str:
    """``piece_03``, ``cut_04``."""
    return f"{'piece' if segment.verdict is None else 'cut'}_{index:02}"


def input_origins(traced: Traced, segment: Segment) -> tuple[str, ...]:
    """Where each input of a piece or cut comes from."""
    origins: list[str] = []
    for source in segment.inputs:
        if isinstance(source, FromSize):
            origins.append(_source_text(source, traced))
        elif source in traced.inputs:
            origins.append(_source_text(traced.inputs[source], traced))
        else:
            origins.append(f"from {op_name(source)}")
    return tuple(origins)


def _comment(segment: Segment) -> str:
    line = f" ({segment.first_line})" if segment.first_line else ""
    if segment.verdict is None:
        return f"# a piece{line}"
    return f"# a cut at {segment.title}{line}: {segment.verdict.reason}"


def _input_text(source: torch.fx.Node | FromSize) -> str:
    return str(source.expr) if isinstance(source, FromSize) else source.name


def _source_text(source: GraphInput, traced: Traced) -> str:
    if isinstance(source, FromCall):
        return f"argument {traced.signature.tensors[source.index].name}"
    if isinstance(source, Weight):
        return f"weight {source.name}"
    return f"size {source.expr}"
