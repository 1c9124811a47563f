"""Positions in the graph of a model: in how many rows it takes them, and those that it counts by itself.

A model is given the positions of its tokens, since sequences lie one behind the other in one row. Some layers count the
tokens of the row all the same (the temperature of Llama 4's layers without rotation), as if it were one sequence. Few
tokens need not show that, so it is looked for in the graph and not left to a comparison of results.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.graph.fx_nodes import source_line
from piecegraph.graph.sources import FromCall
from piecegraph.graph.tracer import Traced

_MROPE_ROWS = (3, 4)
"""Rows of positions in three dimensions, without and with the number of the token in its text."""


def count_by_sequence(traced: Traced, position_input: int, model_name: str) -> tuple[Decision, ...]:
    """Replace every count of the tokens of a row, in the graph itself, by the positions it was given.

    Args:
        traced: the decoder.
        position_input: which of its inputs the positions are.
        model_name: for the message.
    """
    inputs = _inputs(traced)
    tokens, positions = inputs[0], inputs.get(position_input)
    decisions = []
    for node in list(_counts(traced.graph, torch_compat.size_expr(torch_compat.meta_value(tokens).shape[0]))):
        line = str(source_line(node) or node.name)
        if positions is None:
            raise ModelError(
                "PG662",
                f"{model_name} cannot be run",
                where=line,
                why="it counts the tokens of a row as if they were one sequence, and takes no positions",
            )
        with traced.graph.inserting_before(node):
            dtype = torch_compat.meta_value(node).dtype
            count = traced.graph.call_method("to", (positions, dtype))
            count.meta.update(node.meta)
        node.replace_all_uses_with(count)
        traced.graph.erase_node(node)
        decisions.append(Decision("positions", "those of the sequences", f"{line} counts the tokens of a row"))
    return tuple(dict.fromkeys(decisions))


def rows_of_positions(traced: Traced, position_input: int) -> int:
    """In how many rows a model takes positions. Told by what it makes of one row.

    Models of images and videos place a token in three dimensions (time, height, width; *mrope*). Given one row, they
    take it for all three, and some put it once more in front of them, as the number of the token in its text.

    Returns:
        1, 3 or 4.
    """
    inputs = _inputs(traced)
    waiting = [inputs[position_input]] if position_input in inputs else []
    while waiting:
        node = waiting.pop()
        value = torch_compat.meta_value(node)
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            continue  # a rotation: whatever has several rows from here on was made of one
        if value.dim() == 3 and value.shape[0] in _MROPE_ROWS and value.shape[1] == 1:
            return int(value.shape[0])
        waiting += node.users
    return 1


def _inputs(traced: Traced) -> dict[int, torch.fx.Node]:
    """What the decoder is called with, by its place in the call."""
    return {source.index: node for node, source in traced.inputs.items() if isinstance(source, FromCall)}


def _counts(graph: torch.fx.Graph, num_tokens: object) -> Iterator[torch.fx.Node]:
    """Nodes that make the numbers from 0 to the number of tokens."""
    for node in graph.nodes:
        if node.op != "call_function" or torch_compat.op_of(node.target)[0] is not torch.ops.aten.arange:
            continue
        start = node.args[0] if len(node.args) > 1 else 0
        step = node.args[2] if len(node.args) > 2 else 1
        size = torch_compat.meta_value(node).shape
        if (start, step) == (0, 1) and torch_compat.size_expr(size[0]) == num_tokens:
            yield node
