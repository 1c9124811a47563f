"""Whether a call may be padded to a larger recorded size.

Note [Padding]
~~~~~~~~~~~~~~
Padding is sound when the real rows of every result, and everything the function writes to, are the same as without
it. Nobody can tell from the graph (a cut op may do anything), so it is tried: the recorded size is replayed with the
padded rows holding their pad value and again holding NaN, and both are compared with a run of the same rows without
padding. What differs in any real row refuses padding for that size dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecegraph.base.compare import first_difference
from piecegraph.base.plan import SizeKey
from piecegraph.graph.signature import Call
from piecegraph.tape.body import Body, FromOutput, Sizes, can_cut
from piecegraph.tape.buffers import StaticInputs, padded_parts, preserved, real_part, repeat_to, rows_at
from piecegraph.tape.calls import SizedCalls


def padding_changes(
    calls: SizedCalls, run_tape: Callable[[], Sequence[Any]], key: SizeKey, sizes: Sizes, call: Call
) -> str | None:
    """How padding calls of ``sizes`` to the recorded ``key`` changes them, or None if it does not.

    Args:
        calls: what is recorded.
        run_tape: replays the key.
        key: a recorded size.
        sizes: what is padded to it.
        call: its rows, repeated, are what it is tried with.
    """
    body, buffers, state = calls.body, calls.buffers, calls.state
    leaves = buffers.leaves
    rows = [rows_at(tensor, leaf, call.sizes, sizes) for tensor, leaf in zip(call.tensors, leaves, strict=True)]
    written = [i for i in body.written_calls if leaves[i].address is None]
    with preserved(state):
        inputs = [row if leaf.address is not None else row.clone() for row, leaf in zip(rows, leaves, strict=True)]
        plain = body.run(inputs, sizes)
        expected = [*(plain[i] for i in _returned(body)), *(inputs[i] for i in written), *(t.clone() for t in state)]
    if not can_cut(body, key.values, sizes):
        return f"results of {SizeKey(sizes)} rows are not the beginning of results of {key} rows"
    for poisoned in (False, True):
        with preserved(state):
            _load(buffers, key, sizes, rows, poisoned=poisoned)
            outputs = _real_outputs(run_tape(), body, sizes)
            views = buffers.views(key.values)
            reason = first_difference(
                [*outputs, *(real_part(views[i], leaves[i], sizes) for i in written), *state], expected
            )
        if reason is not None:
            what = "NaN in padded rows" if poisoned else "padding"
            return f"{what} gives {reason} (tried {SizeKey(sizes)} rows padded to {key})"
    return None


def _load(
    buffers: StaticInputs, key: SizeKey, sizes: tuple[int, ...], rows: Sequence[torch.Tensor], *, poisoned: bool
) -> None:
    for view, row, leaf, pad in zip(buffers.views(key.values), rows, buffers.leaves, buffers.pad_values, strict=True):
        if leaf.address is None:
            real_part(view, leaf, sizes).copy_(row)
            for part in padded_parts(view, leaf, sizes):
                if not poisoned:
                    part.fill_(pad)
                elif view.is_floating_point() or view.is_complex():
                    part.fill_(float("nan"))
                else:
                    # No integer is like NaN, but any index must be valid: repeat real rows.
                    part.copy_(repeat_to(row, part.shape))
    buffers.filled_by = None


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
