"""Whether a call may be padded to a larger recorded size.

Note [Padding]
~~~~~~~~~~~~~~
Padding is sound when the real rows of every result, and everything the function writes to, are the same as without
it. Nobody can tell from the graph (a cut op may do anything), so it is tried: the recorded size is replayed with the
padded rows holding their pad value and again holding NaN, and both are compared with a run of the same rows without
padding. A call may hide what its signs decide (``relu_``), so it is tried with its numbers negated, too. No integer is
like NaN, so for integers two more runs have the least value of the call in real rows and the largest in padded rows,
and the other way round. What differs in any real row refuses padding for that size dimension.
So do random numbers, wherever they go: those drawn after the call would be others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.compare import first_difference
from piecegraph.base.plan import SizeKey
from piecegraph.graph.signature import Call, TensorLeaf
from piecegraph.tape.body import Body, FromOutput, Sizes, can_cut
from piecegraph.tape.buffers import padded_parts, preserved, real_part, repeat_to, rows_at
from piecegraph.tape.calls import SizedCalls


class Unclear(str):
    """Why a trial would not show whether padding changes anything."""

    __slots__ = ()


def padding_changes(
    calls: SizedCalls, run_tape: Callable[[], Sequence[Any]], key: SizeKey, sizes: Sizes, call: Call
) -> str | Unclear | None:
    """How padding calls of ``sizes`` to the recorded ``key`` changes them, or None if it does not.

    Args:
        calls: what is recorded.
        run_tape: replays the key.
        key: a recorded size.
        sizes: what is padded to it.
        call: its rows, repeated, are what it is tried with.
    """
    body, leaves = calls.body, calls.buffers.leaves
    rows = [rows_at(tensor, leaf, call.sizes, sizes) for tensor, leaf in zip(call.tensors, leaves, strict=True)]
    random_states = torch_compat.random_states(calls.devices)
    expected = _run_without(calls, rows, sizes)
    if torch_compat.random_states(calls.devices) != random_states:
        return "it draws random numbers, and more of them for more rows"
    if not can_cut(body, key.values, sizes):
        return f"results of {SizeKey(sizes)} rows are not the beginning of results of {key} rows"
    tried = f"(tried {SizeKey(sizes)} rows padded to {key})"
    for what, padding in (("padding", _pad_values(calls)), ("NaN in padded rows", _poison(calls, rows))):
        reason = first_difference(_run_padded(calls, run_tape, key, sizes, rows, padding), expected)
        if reason is not None:
            return f"{what} gives {reason} {tried}"
    negated = [-row if _has_nan(leaf) and leaf.dynamic else row for row, leaf in zip(rows, leaves, strict=True)]
    reason = _other_rows_change(calls, run_tape, key, sizes, negated, _poison(calls, rows))
    return (
        f"with negated numbers it gives {reason} {tried}"
        if reason
        else _extremes_change(calls, run_tape, key, sizes, rows)
    )


def _other_rows_change(
    calls: SizedCalls,
    run_tape: Callable[[], Sequence[Any]],
    key: SizeKey,
    sizes: Sizes,
    rows: Sequence[torch.Tensor],
    padding: Sequence[torch.Tensor],
) -> str | None:
    """How padding changes what comes of rows that are not those of the call; None also if they make no valid call."""
    try:
        expected = _run_without(calls, rows, sizes)
    except Exception:  # noqa: BLE001 - numbers that must go together: nothing is learned
        return None
    return first_difference(_run_padded(calls, run_tape, key, sizes, rows, padding), expected)


def _extremes_change(
    calls: SizedCalls, run_tape: Callable[[], Sequence[Any]], key: SizeKey, sizes: Sizes, rows: Sequence[torch.Tensor]
) -> str | Unclear | None:
    """The same, with the least integers of the call in real rows and the largest in padded ones; and the other way."""
    leaves = calls.buffers.leaves
    padded = [i for i, leaf in enumerate(leaves) if leaf.dynamic and leaf.address is None]
    counted = [i for i in padded if not _has_nan(leaves[i])]
    least, largest = list(rows), list(rows)
    for i in counted:
        least[i], largest[i] = (row.expand_as(rows[i]) for row in _extremes(rows[i], leaves[i]))
    pads = calls.buffers.pad_values
    if counted == padded and all(bool((least[i] == pads[i]).all() & (largest[i] == pads[i]).all()) for i in counted):
        return Unclear(f"all of {', '.join(leaves[i].name for i in counted)} is what padding would be")
    for real, other in ((least, largest), (largest, least)) if counted else ():
        reason = _other_rows_change(calls, run_tape, key, sizes, real, _poison(calls, other))
        if reason is not None:
            return f"other numbers in padded rows give {reason} (tried {SizeKey(sizes)} rows padded to {key})"
    return None


def _extremes(rows: torch.Tensor, leaf: TensorLeaf) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest value of each column, over all dimensions that vary."""
    dims = [dim for dim, _ in leaf.dynamic]
    numbers = rows.to(torch.int64)
    return numbers.amin(dims, keepdim=True).to(rows.dtype), numbers.amax(dims, keepdim=True).to(rows.dtype)


def _has_nan(leaf: TensorLeaf) -> bool:
    return leaf.dtype.is_floating_point or leaf.dtype.is_complex


def _pad_values(calls: SizedCalls) -> list[torch.Tensor]:
    buffers = calls.buffers
    pairs = zip(buffers.leaves, buffers.pad_values, strict=True)
    return [torch.tensor(value, dtype=leaf.dtype, device=leaf.device) for leaf, value in pairs]


def _poison(calls: SizedCalls, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """NaN. No integer is like it, and any index must be valid: rows of the call."""
    return [
        torch.tensor(float("nan"), dtype=leaf.dtype, device=leaf.device) if _has_nan(leaf) else row
        for leaf, row in zip(calls.buffers.leaves, rows, strict=True)
    ]


def _run_without(calls: SizedCalls, rows: Sequence[torch.Tensor], sizes: Sizes) -> list[Any]:
    """What a run without padding returns and writes."""
    body, leaves, state = calls.body, calls.buffers.leaves, calls.state
    with preserved(state):
        inputs = [row if leaf.address is not None else row.clone() for row, leaf in zip(rows, leaves, strict=True)]
        plain = body.run(inputs, sizes)
        return [
            *(plain[i] for i in _returned(body)),
            *(inputs[i] for i in _written(calls)),
            *(t.clone() for t in state),
        ]


def _run_padded(
    calls: SizedCalls,
    run_tape: Callable[[], Sequence[Any]],
    key: SizeKey,
    sizes: Sizes,
    rows: Sequence[torch.Tensor],
    padding: Sequence[torch.Tensor],
) -> list[Any]:
    """The real part of what a run with padding returns and writes."""
    leaves, views = calls.buffers.leaves, calls.buffers.views(key.values)
    with preserved(calls.state):
        for view, row, leaf, pad in zip(views, rows, leaves, padding, strict=True):
            if leaf.address is None:
                real_part(view, leaf, sizes).copy_(row)
                for part in padded_parts(view, leaf, sizes):
                    part.copy_(repeat_to(pad, part.shape) if pad.dim() else pad)
        calls.buffers.filled_by = None
        outputs = _real_outputs(run_tape(), calls.body, sizes)
        written = [real_part(views[i], leaves[i], sizes) for i in _written(calls)]
        return [
            value.clone() if isinstance(value, torch.Tensor) else value for value in (*outputs, *written, *calls.state)
        ]


def _written(calls: SizedCalls) -> list[int]:
    return [i for i in calls.body.written_calls if calls.buffers.leaves[i].address is None]


def _returned(body: Body) -> list[int]:
    """The outputs that the caller gets to see."""
    return [leaf.index for leaf in body.leaves if isinstance(leaf, FromOutput)]


def _real_outputs(outputs: Sequence[Any], body: Body, sizes: tuple[int, ...]) -> list[Any]:
    """The real part of every output."""
    cut: list[Any] = []
    for index in _returned(body):
        value = outputs[index]
        shape = body.output_shape(index, sizes) if isinstance(value, torch.Tensor) else None
        for dim, length in enumerate(shape or ()):
            value = value.narrow(dim, 0, length)
        cut.append(value)
    return cut
