"""Whether a call may be padded to a larger recorded size.

Note [Padding]
~~~~~~~~~~~~~~
Padding is sound when the real rows of every result, and everything the function writes to, are the same as without
it. Nobody can tell from the graph (a cut op may do anything), so it is tried: the recorded size is replayed with the
padded rows holding their pad value and again holding NaN, and both are compared with a run of the same rows without
padding. A call may hide what its signs decide (``relu_``), or which side of the pad value it is on (``(x > 0).all()``),
so it is tried with its numbers negated, and with all of them above zero and below, too. No integer is like NaN, so for
integers two more runs have the least value of the call, or the pad value, in real rows and the largest in padded rows,
and the other way round. Numbers far above and far below zero in padded rows show what rounding hides
(``(x // 8).amin()``). What may become an index stays a row of the call, of integers or not. What differs in any real
row refuses padding for that size dimension.

All that is tried at one size. A number that is made of how many rows there are is another at each size, and may be
another only at some (``max(x.shape[0], 16)``); and of rows in groups, the last may be full (pooling by twos). So where
sizes make numbers or are rounded, every size that is padded is tried once more when it first occurs, and what differs
there refuses padding for all sizes.

Random numbers refuse it wherever they go: those drawn after the call would be others. So does a result of integers or
truth values that is made of rows and has none: no number in it would be NaN, and which numbers would make it another
is not known. Nor is that known of what ``torch.cond`` goes by, of truth values inside that are made of rows and have
none (``x.amin() > 100``), and of counts of truth values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    trial = _Trial(calls, run_tape, key, sizes)
    leaves = calls.buffers.leaves
    rows = [rows_at(tensor, leaf, call.sizes, sizes) for tensor, leaf in zip(call.tensors, leaves, strict=True)]
    random_states = torch_compat.random_states(calls.devices)
    expected = trial.without_padding(rows)
    if torch_compat.random_states(calls.devices) != random_states:
        return "it draws random numbers, and more of them for more rows"
    at_key = [rows_at(tensor, leaf, call.sizes, key.values) for tensor, leaf in zip(call.tensors, leaves, strict=True)]
    for tensors, learned in ((rows, sizes), (at_key, key.values)):
        calls.body.learn(tensors, learned)
    if decision := calls.body.decision_by_rows(key.values, sizes):
        return f"padded rows would be part of what decides: {decision} counts or compares all rows together"
    if not can_cut(calls.body, key.values, sizes):
        return f"results of {SizeKey(sizes)} rows are not the beginning of results of {key} rows"
    if (number := _blind_result(calls, key, expected)) is not None:
        return f"result {number} is made of rows and has none, nor numbers that would show what padded ones do"
    paddings = {"padding": _pad_values(calls), "NaN in padded rows": _poison(calls, rows)}
    large = {f"numbers {name} in padded rows": _large(calls, rows, sign) for name, sign in _LARGE.items()}
    for what, padding in (paddings | large).items():
        reason = first_difference(trial.padded(rows, padding), expected)
        if reason is not None:
            return f"{what} gives {reason} {trial}"
    for name, change in _OTHER_NUMBERS.items():
        others = _changed(calls, rows, change)
        for what, padding in paddings.items():
            if reason := trial.other_rows_change(others, padding):
                return f"with {name} {what} gives {reason} {trial}"
    return _extremes_change(trial, rows)


def number_of_rows_changes(
    calls: SizedCalls, run_tape: Callable[[], Sequence[Any]], key: SizeKey, sizes: Sizes, call: Call
) -> str | None:
    """How a call of ``sizes`` differs at the recorded ``key`` because more rows are there, or None if it does not."""
    trial = _Trial(calls, run_tape, key, sizes)
    padding = _pad_values(calls)
    for rows in (call.tensors, *with_other_numbers(calls, call.tensors)):
        if reason := trial.other_rows_change(rows, padding):
            return f"padding gives {reason} {trial}"
    return None


_OTHER_NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated numbers": torch.neg,
    "numbers above zero": lambda rows: rows.abs().to(rows.dtype) + 1,
    "numbers below zero": lambda rows: -(rows.abs().to(rows.dtype) + 1),
}


def with_other_numbers(calls: SizedCalls, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of a call with numbers above zero, and below: first calls often hold zeros, which show little."""
    return [_changed(calls, tensors, _OTHER_NUMBERS[f"numbers {side} zero"]) for side in ("above", "below")]


def _blind_result(calls: SizedCalls, key: SizeKey, results: Sequence[Any]) -> int | None:
    """A result that no trial would show to be another."""
    body = calls.body
    for number, (index, value) in enumerate(zip(_returned(body), results, strict=False)):
        if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
            continue
        if body.output_shape(index, key.values) == tuple(value.shape) and body.reads_rows(index):
            return number
    return None


@dataclass(frozen=True)
class _Trial:
    """Runs rows of one size without padding, and padded to a recorded one."""

    calls: SizedCalls
    run_tape: Callable[[], Sequence[Any]]
    key: SizeKey
    sizes: Sizes

    def __str__(self) -> str:
        return f"(tried {SizeKey(self.sizes)} rows padded to {self.key})"

    def without_padding(self, rows: Sequence[torch.Tensor]) -> list[Any]:
        """What a run without padding returns and writes."""
        body, leaves, state = self.calls.body, self.calls.buffers.leaves, self.calls.state
        with preserved(state):
            inputs = [row if leaf.address is not None else row.clone() for row, leaf in zip(rows, leaves, strict=True)]
            plain = body.run(inputs, self.sizes)
            return [
                *(plain[i] for i in _returned(body)),
                *(inputs[i] for i in _written(self.calls)),
                *(t.clone() for t in state),
            ]

    def padded(self, rows: Sequence[torch.Tensor], padding: Sequence[torch.Tensor]) -> list[Any]:
        """The real part of what a run with padding returns and writes."""
        buffers, state = self.calls.buffers, self.calls.state
        leaves, views = buffers.leaves, buffers.views(self.key.values)
        with preserved(state):
            for view, row, leaf, pad in zip(views, rows, leaves, padding, strict=True):
                if leaf.address is None:
                    real_part(view, leaf, self.sizes).copy_(row)
                    for part in padded_parts(view, leaf, self.sizes):
                        part.copy_(repeat_to(pad, part.shape) if pad.dim() else pad)
            buffers.filled_by = None
            outputs = _real_outputs(self.run_tape(), self.calls.body, self.sizes)
            written = [real_part(views[i], leaves[i], self.sizes) for i in _written(self.calls)]
            return [
                value.clone() if isinstance(value, torch.Tensor) else value for value in (*outputs, *written, *state)
            ]

    def other_rows_change(self, rows: Sequence[torch.Tensor], padding: Sequence[torch.Tensor]) -> str | None:
        """How padding changes what comes of rows that are not those of the call; None also if they make no valid
        call.
        """
        try:
            expected = self.without_padding(rows)
        except Exception:  # noqa: BLE001 - numbers that must go together: nothing is learned
            return None
        return first_difference(self.padded(rows, padding), expected)


def _changed(
    calls: SizedCalls, rows: Sequence[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """The rows with other numbers where they are copied into buffers; torch negates none of eight bits."""
    return [
        change(row) if takes_any and leaf.dynamic and leaf.address is None and leaf.dtype.itemsize > 1 else row
        for row, leaf, takes_any in zip(rows, calls.buffers.leaves, _take_any(calls), strict=True)
    ]


def _extremes_change(trial: _Trial, rows: Sequence[torch.Tensor]) -> str | Unclear | None:
    """The same, with the least integers of the call in real rows and the largest in padded ones; and the other way.

    The pad value counts as one of the call: it is valid, and a call may hold one value alone. So do large numbers,
    where any may be.
    """
    calls = trial.calls
    leaves, pads = calls.buffers.leaves, calls.buffers.pad_values
    padded = [i for i, leaf in enumerate(leaves) if leaf.dynamic and leaf.address is None]
    counted = [i for i, takes_any in enumerate(_take_any(calls)) if i in padded and not takes_any]
    least, largest = list(rows), list(rows)
    for i in counted:
        least[i], largest[i] = (row.expand_as(rows[i]) for row in _extremes(rows[i], leaves[i], _bounds(calls, i)))
    if counted == padded and all(bool((least[i] == pads[i]).all() & (largest[i] == pads[i]).all()) for i in counted):
        return Unclear(f"all of {', '.join(leaves[i].name for i in counted)} is what padding would be")
    for real, other in ((least, largest), (largest, least)) if counted else ():
        reason = trial.other_rows_change(real, _poison(calls, other))
        if reason is not None:
            return f"other numbers in padded rows give {reason} {trial}"
    return None


def _extremes(rows: torch.Tensor, leaf: TensorLeaf, bounds: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest value of each column, over all dimensions that vary, and of two numbers."""
    dims = [dim for dim, _ in leaf.dynamic]
    numbers, (low, high) = (rows, bounds) if leaf.dtype.is_floating_point else (rows.to(torch.int64), map(int, bounds))
    return (
        numbers.amin(dims, keepdim=True).clamp(max=low).to(rows.dtype),
        numbers.amax(dims, keepdim=True).clamp(min=high).to(rows.dtype),
    )


def _bounds(calls: SizedCalls, index: int) -> tuple[float, float]:
    """What extreme numbers of an argument are at most and at least."""
    if _takes_large(calls, index):
        dtype = calls.buffers.leaves[index].dtype
        return _large_number(dtype, -1), _large_number(dtype, 1)
    pad = calls.buffers.pad_values[index]
    return pad, pad


def _take_any(calls: SizedCalls) -> list[bool]:
    """For each argument whether it takes any number, NaN among them: integers do not, nor what becomes an index."""
    indices = calls.body.indices.shown
    kinds = [leaf.dtype.is_floating_point or leaf.dtype.is_complex for leaf in calls.buffers.leaves]
    return [is_real and i not in indices for i, is_real in enumerate(kinds)]


def _pad_values(calls: SizedCalls) -> list[torch.Tensor]:
    buffers = calls.buffers
    pairs = zip(buffers.leaves, buffers.pad_values, strict=True)
    return [torch.tensor(value, dtype=leaf.dtype, device=leaf.device) for leaf, value in pairs]


def _poison(calls: SizedCalls, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """NaN. No integer is like it, and any index must be valid: rows of the call."""
    return [
        torch.tensor(float("nan"), dtype=leaf.dtype, device=leaf.device) if takes_any else row
        for leaf, row, takes_any in zip(calls.buffers.leaves, rows, _take_any(calls), strict=True)
    ]


_LARGE = {"far above zero": 1, "far below zero": -1}


def _large(calls: SizedCalls, rows: Sequence[torch.Tensor], sign: int) -> list[torch.Tensor]:
    """Numbers that no rounding hides; rows of the call where they may become indices."""
    return [
        torch.tensor(_large_number(leaf.dtype, sign), dtype=leaf.dtype, device=leaf.device)
        if _takes_large(calls, i)
        else row
        for i, (leaf, row) in enumerate(zip(calls.buffers.leaves, rows, strict=True))
    ]


def _takes_large(calls: SizedCalls, index: int) -> bool:
    return calls.buffers.leaves[index].dtype is not torch.bool and index not in calls.body.indices.possible


def _large_number(dtype: torch.dtype, sign: int) -> float:
    """Not a power of two, which bit masks would hide.

    >>> _large_number(torch.float32, -1), _large_number(torch.float16, 1), _large_number(torch.int64, 1)
    (-1000000.0, 16376.0, 65535)
    >>> _large_number(torch.uint8, -1), _large_number(torch.int8, -1)
    (0, -128)
    """
    if dtype.is_floating_point or dtype.is_complex:
        return sign * min(1e6, torch.finfo(dtype).max / 4)
    limits = torch.iinfo(dtype)
    return max(limits.min, min(limits.max, sign * 65535))


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
