"""Whether a trace computes what the function computes: both have run once, on the same data.

A function can tell that it is being traced (``torch.compiler.is_compiling()``), and libraries ask; then a trace is
right about code that never runs. Tracers have faults, too. Neither is a matter of guards: only values tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx

from piecegraph.base import torch_compat
from piecegraph.base.compare import difference
from piecegraph.engine.watch import Watched, watch_example
from piecegraph.errors import TraceError
from piecegraph.graph.example import Example, sizes_of
from piecegraph.graph.sources import FromCall, FromGraph, Weight
from piecegraph.graph.streams import StreamInterpreter
from piecegraph.graph.tracer import Traced
from piecegraph.tape.buffers import preserved


def check_trace(traced: Traced, watched: Watched, function: Callable[..., Any], example: Example) -> None:
    """Refuse a trace that gives other values than the function gave when it was watched."""
    sizes = sizes_of(traced.signature, example)
    if min(sizes, default=2) < 2:  # traced as two; such a size is compared with the function when it is served
        return
    expected = dict(_computed(traced, watched))
    if not expected and not watched.left:
        return
    try:
        found, left = _run(traced, watched, example, sizes)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - it is raised again when the first size is recorded, and told with its place
        return
    pairs = [*((found[node], value) for node, value in expected.items()), *zip(left, watched.left, strict=True)]
    for mine, value in pairs:
        reason = difference(mine, value)
        if reason is not None and _is_repeatable(traced, watched, function, example):
            raise TraceError(
                "PG208",
                "the trace computes something else than the function",
                why=f"{reason} on the same data; a function may ask whether it is being traced, and go another way",
                hint='use frontend="breakable", which runs the code as it is',
            )


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

    def value_of(source: Any) -> Any:
        if isinstance(source, FromCall):
            return copies[source.index]
        return source.tensor if isinstance(source, Weight) else traced.sizes.evaluate(source.expr, sizes)

    run = StreamInterpreter(torch.fx.GraphModule(traced.owner, traced.graph), traced.streams)
    written = (*(weight.tensor for weight in traced.written_weights), *watched.written_state)
    devices = [tensor.device for tensor in example.tensors]
    with preserved(written), torch_compat.drawn_again(devices), torch.no_grad():
        values = run(*map(value_of, traced.inputs.values()))
        arguments = (torch_compat.memory_of(copies[i]) for i in watched.written_calls)
        left = [memory.clone() for memory in (*arguments, *watched.written_state)]
    return dict(zip(traced.graph.output_node().args[0], values, strict=True)), left  # type: ignore[arg-type]


def _is_repeatable(traced: Traced, watched: Watched, function: Callable[..., Any], example: Example) -> bool:
    """Whether the function itself gives the same values again: uninitialised memory does not."""
    seen = watch_example(function, example)
    again, left = dict(_computed(traced, seen)), zip(seen.left, watched.left, strict=False)
    return all(difference(again[node], value) is None for node, value in _computed(traced, watched)) and all(
        difference(mine, other) is None for mine, other in left
    )
