"""Whether a trace computes what the function computes: both have run once, on the same data.

A function can tell that it is being traced (``torch.compiler.is_compiling()``), and libraries ask; then a trace is
right about code that never runs. Tracers have faults, too. Neither is a matter of guards: only values tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.compare import difference, is_telling, same_bits
from piecegraph.engine.watch import Watched, watch_example
from piecegraph.errors import TraceError
from piecegraph.graph.example import Example, sizes_of
from piecegraph.graph.sources import FromCall, FromGraph, Weight
from piecegraph.graph.streams import StreamInterpreter
from piecegraph.graph.tracer import Traced
from piecegraph.tape.buffers import preserved


def check_trace(traced: Traced, watched: Watched, function: Callable[..., Any], example: Example) -> bool:
    """Refuse a trace that gives other values than the function gave when it was watched. Whether all were compared, are
    the same to the bit, and are such that a difference would show.
    """
    sizes = sizes_of(traced.signature, example)
    # Traced as two, a smaller size may give something else; it is compared with the function when it is served.
    may_differ = min(sizes, default=2) < 2
    if may_differ and not traced.decisions:
        return False
    expected = dict(_computed(traced, watched))
    if not expected and not watched.left:
        return False
    try:
        found, left = _run(traced, watched, example, sizes)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - it is raised again when the first size is recorded, and told with its place
        return False
    pairs = [*((found[node], value) for node, value in expected.items()), *zip(left, watched.left, strict=True)]
    for mine, value in pairs:
        reason = None if may_differ else difference(mine, value)
        if reason is not None and _is_repeatable(traced, watched, function, example):
            raise TraceError(
                "PG208",
                "the trace computes something else than the function",
                why=f"{reason} on the same data; a function may ask whether it is being traced, and go another way",
                hint='use frontend="breakable", which runs the code as it is',
            )
    are_same = all(isinstance(mine, torch.Tensor) and same_bits(mine, value) for mine, value in pairs)
    return are_same and all(map(is_telling, (*example.tensors, *(value for _, value in pairs))))


def _computed(traced: Traced, watched: Watched) -> Iterator[tuple[torch.fx.Node, Any]]:
    """What the function computed, by the node that computes it in the trace. What was put back is not among it."""
    restored = {torch_compat.storage_id(tensor) for tensor in (*watched.inputs, *watched.written_state)}
    for leaf, value in zip(traced.results, watched.leaves(len(traced.results)), strict=False):
        if isinstance(leaf, FromGraph) and isinstance(value, torch.Tensor) and torch_compat.has_memory(value):
            if torch_compat.storage_id(value) in restored:
                continue
            yield leaf.node, value


def _run(
    traced: Traced, watched: Watched, example: Example, sizes: tuple[int, ...]
) -> tuple[dict[Any, Any], list[torch.Tensor]]:
    """The values of the trace's outputs for the example call, and what it leaves where the function was seen to write.
    That is put back.
    """
    copies = [tensor.clone() for tensor in example.tensors]
    written = (*(weight.tensor for weight in traced.written_weights), *watched.written_state)
    devices = [tensor.device for tensor in example.tensors]
    with preserved(written), torch_compat.drawn_again(devices), torch.no_grad():
        found = interpret(traced, copies, sizes)
        arguments = (torch_compat.memory_of(copies[i]) for i in watched.written_calls)
        left = [memory.clone() for memory in (*arguments, *watched.written_state)]
    return found, left


def interpret(traced: Traced, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> dict[Any, Any]:
    """The values of a trace's outputs, op by op, for the tensors of a call."""

    def value_of(source: Any) -> Any:
        if isinstance(source, FromCall):
            return tensors[source.index]
        return source.tensor if isinstance(source, Weight) else traced.sizes.evaluate(source.expr, sizes)

    run = StreamInterpreter(torch.fx.GraphModule(traced.owner, traced.graph), traced.streams)
    values = run(*map(value_of, traced.inputs.values()))
    return dict(zip(traced.graph.output_node().args[0], values, strict=True))  # type: ignore[arg-type]


def _is_repeatable(traced: Traced, watched: Watched, function: Callable[..., Any], example: Example) -> bool:
    """Whether the function itself gives the same values again: uninitialised memory does not."""
    seen = watch_example(function, example)
    again, left = dict(_computed(traced, seen)), zip(seen.left, watched.left, strict=False)
    return all(difference(again[node], value) is None for node, value in _computed(traced, watched)) and all(
        difference(mine, other) is None for mine, other in left
    )
