"""One op of PyTorch's own operator database against itself through ``compile``.

Samples of the database come in, of several dtypes, shapes and keyword arguments; a verdict comes out. Each sample is
called three times, with fresh data of the same kind, so that the second and the third call are replays. Compared with
plain PyTorch are the results, what the op wrote to its arguments, which arguments a result shares its memory with, and,
behind the last call, the results of all calls once more.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo.core import OpInfo

import piecegraph
from piecegraph.base.structure import flatten
from piecegraph.errors import NOTES, PiecegraphError

VerdictName = Literal["no samples", "equal", "fell back", "refused", "wrong", "crashed"]
VERDICTS: tuple[VerdictName, ...] = ("no samples", "equal", "fell back", "refused", "wrong", "crashed")
"""From good to bad: the verdict on an op is the worst of those on its samples."""
FAILURES = frozenset({"wrong", "crashed"})

OPS: dict[str, OpInfo] = {op.formatted_name: op for op in common_methods_invocations.op_db}
# The database seeds random ops inside of the call, which no replay would repeat. Here the caller seeds.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
# Importing it keeps whoever comes later in this process from setting flags of torch.backends.
torch.backends.__allow_nonbracketed_mutation_flag = True

_NUM_CALLS = 3
_NUM_LOOKED_AT = 16
"""Samples of a dtype among which different ones are chosen."""
_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Others: that of the device."""
_DEVICE_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-3}
"""The kernels are the same. On a GPU, some take another algorithm where the workspace is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpVerdict:
    """What came out for one op, or for one of its samples."""

    op: str
    verdict: VerdictName
    sample: str = ""
    """The one that decided."""
    code: str = ""
    reason: str = ""
    num_calls: int = 0
    """Calls that were compared."""
    is_structure_only: bool = False
    """Its values are not the same in two plain runs, so that only dtypes, shapes and structure were compared."""
    seconds: float = 0.0


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Made(NamedTuple):
    """A call that was made: its arguments, as they are now, and what it returned."""

    call: _Call
    result: Any


@dataclass(frozen=True, slots=True)
class _Sample:
    """One way to call an op, with the data of each call."""

    title: str
    function: Callable[..., Any]
    calls: tuple[_Call, ...]


def check_op(op: OpInfo, *, device: str, frontend: str, num_samples: int) -> OpVerdict:
    """Compare some samples of an op. Never raises what the product should have refused."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdicts = [_check_sample(op, sample, device, frontend) for sample in _samples(op, device, num_samples)]
    if not verdicts:
        return OpVerdict(op=op.formatted_name, verdict="no samples")
    worst = max(verdicts, key=lambda verdict: VERDICTS.index(verdict.verdict))
    return replace(
        worst,
        num_calls=sum(verdict.num_calls for verdict in verdicts),
        is_structure_only=any(verdict.is_structure_only for verdict in verdicts),
    )


# --- samples


def _samples(op: OpInfo, device: str, most: int) -> Iterator[_Sample]:
    """Samples of different dtypes and kinds, each also in place where the op can be."""
    dtypes = [dtype for dtype in _DTYPES if op.supports_dtype(dtype, device)] or sorted(
        op.supported_dtypes(device), key=str
    )
    variants = [("", op.op)] + ([(" in place", op.inplace_variant)] if op.inplace_variant is not None else [])
    for dtype, share in _shares(dtypes, most):
        name = str(dtype).removeprefix("torch.")
        for index, calls in _different_samples(op, device, dtype, share):
            for suffix, function in variants:
                yield _Sample(f"{name} sample {index}{suffix}", function, calls)


def _shares(dtypes: Sequence[torch.dtype], most: int) -> list[tuple[torch.dtype, int]]:
    """How many samples each dtype gets, the first ones more."""
    chosen = list(itertools.islice(itertools.cycle(dtypes), most)) if dtypes else []
    return [(dtype, chosen.count(dtype)) for dtype in dict.fromkeys(chosen)]


def _different_samples(
    op: OpInfo, device: str, dtype: torch.dtype, most: int
) -> Iterator[tuple[int, tuple[_Call, ...]]]:
    """Samples of different kinds, spread over the first ones of the database, with fresh data for every call."""
    rounds = [_generate(op, device, dtype, seed) for seed in range(_NUM_CALLS)]
    kinds: dict[str, int] = {}
    for index, call in enumerate(rounds[0]):
        kinds.setdefault(_kind(call), index)
    indices = list(kinds.values())
    most = min(most, len(indices))  # each from the middle of its part of the list: the first ones are often trivial
    for index in (indices[len(indices) * (2 * part + 1) // (2 * most)] for part in range(most)):
        first = rounds[0][index]
        later = [_of_same_kind(first, made[index]) for made in rounds[1:] if index < len(made)]
        yield index, (first, *later)


def _generate(op: OpInfo, device: str, dtype: torch.dtype, seed: int) -> list[_Call]:
    _seed(seed, device)
    random.seed(0)  # it chooses shapes and numbers, which a plan is for
    np.random.seed(0)
    # Not by sample_inputs(), which gives every sample the same seed, and looks for its caller in the whole stack.
    samples = itertools.islice(op.sample_inputs_func(op, device, dtype, False), _NUM_LOOKED_AT)
    with contextlib.suppress(RuntimeError, NotImplementedError):  # of a build of torch that lacks the op
        return [_Call((sample.input, *sample.args), sample.kwargs) for sample in samples]
    return []


def _seed(seed: int, device: str) -> None:
    torch.default_generator.manual_seed(
        seed
    )  # torch.manual_seed takes a stack trace for every device that is not there
    if device == "cuda":
        torch.cuda.manual_seed(seed)


def _kind(call: _Call) -> str:
    """What tells calls apart that are no replays of each other."""
    leaves, _, structure = flatten(tuple(call))
    return repr((structure, [_describe(leaf) for leaf in leaves]))


def _describe(leaf: Any) -> Any:
    return (leaf.dtype, leaf.shape, leaf.stride()) if _is_dense(leaf) else repr(leaf)


def _of_same_kind(first: _Call, fresh: _Call) -> _Call:
    """The first call with the fresh one's tensors: numbers that were drawn, too, are those of the first."""
    leaves, _, structure = flatten(tuple(first))
    others, _, other_structure = flatten(tuple(fresh))
    if structure != other_structure:
        return fresh
    pairs = zip(leaves, others, strict=True)
    return _Call(*structure.build(iter([b if isinstance(b, torch.Tensor) else a for a, b in pairs])))


# --- one sample


def _check_sample(op: OpInfo, sample: _Sample, device: str, frontend: str) -> OpVerdict:
    about: dict[str, Any] = {"op": op.formatted_name, "sample": sample.title}
    plain = [_run(sample.function, sample, number, device) for number in range(len(sample.calls))]
    if isinstance(plain[0], Exception):
        return OpVerdict(**about, verdict="no samples", reason=f"plain PyTorch raises {_in_short(plain[0])}")
    about["is_structure_only"] = _is_uninitialised(op) or not _repeats(sample, plain[0], device)
    with contextlib.closing(_compile(sample.function, device, frontend)) as fast:
        return _compare_calls(fast, sample, plain, device, about)


def _compare_calls(
    fast: Any, sample: _Sample, plain: Sequence[_Made | Exception], device: str, about: dict[str, Any]
) -> OpVerdict:
    """Make the calls of a sample, and compare them with those that were made plainly."""
    made: list[tuple[_Made, _Made]] = []
    for number, expected in enumerate(plain):
        if isinstance(expected, Exception):
            continue
        found = _run(fast, sample, number, device)
        if isinstance(found, PiecegraphError):
            return OpVerdict(**about, verdict="refused", code=found.code, reason=_in_short(found))
        if isinstance(found, Exception):
            return OpVerdict(**about, verdict="crashed", reason=f"call {number}: {_in_short(found)}")
        made.append((found, expected))
        # Results of earlier calls must not change with later ones.
        for earlier, (result, plain_result) in enumerate(made):
            difference = _difference(result, plain_result, device, about["is_structure_only"])
            if difference is not None:
                when = f"call {earlier}" + (f", after call {number}" if earlier < number else "")
                return OpVerdict(**about, verdict="wrong", reason=f"{when}: {difference}", num_calls=len(made))
    losses = sorted(set(fast.stats()["events"]) - NOTES)
    verdict: VerdictName = "fell back" if losses else "equal"
    return OpVerdict(**about, verdict=verdict, code=" ".join(losses), num_calls=len(made))


def _compile(function: Callable[..., Any], device: str, frontend: str) -> Any:
    def call_op(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    options = {"graph_device": "simulated"} if device == "cpu" else {}
    return piecegraph.compile(call_op, backend="eager", frontend=frontend, on_fallback="ignore", options=options)


def _run(function: Callable[..., Any], sample: _Sample, number: int, device: str) -> _Made | Exception:
    """Make one call, with arguments and random numbers of its own."""
    call = _copy_of(sample.calls[number])
    _seed(number, device)
    try:
        return _Made(call, function(*call.args, **call.kwargs))
    except Exception as error:  # noqa: BLE001 - what an op raises, or compile, is what is looked for
        return error


def _copy_of(call: _Call) -> _Call:
    """New memory, shared and laid out as in the original."""
    leaves, _, structure = flatten(tuple(call))
    known: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return copy.deepcopy(leaf, known) if leaf.layout is torch.strided else leaf.clone()

    return _Call(*structure.build(iter([copied(leaf) for leaf in leaves])))


def _is_uninitialised(op: OpInfo) -> bool:
    return "empty" in op.name


def _repeats(sample: _Sample, first: _Made, device: str) -> bool:
    """Whether plain PyTorch, with the same seed, gives the same twice."""
    again = _run(sample.function, sample, 0, device)
    return isinstance(again, _Made) and _difference(again, first, device, is_structure_only=False) is None


# --- comparing


def _difference(found: _Made, expected: _Made, device: str, is_structure_only: bool) -> str | None:
    """How a call differs from the plain one: in its result, in what it did to its arguments, in what they share."""
    for what, a, b in (("result", found.result, expected.result), ("arguments", found.call, expected.call)):
        leaves, paths, structure = flatten(a, what)
        others, _, other_structure = flatten(b)
        if structure != other_structure:
            return f"{what}: another structure"
        for path, leaf, other in zip(paths, leaves, others, strict=True):
            difference = _leaf_difference(leaf, other, device, is_structure_only)
            if difference is not None:
                return f"{path}: {difference}"
    shared, expected_shared = _shared_memory(found), _shared_memory(expected)
    return None if shared == expected_shared else f"result is {shared} of arguments instead of {expected_shared}"


def _leaf_difference(found: Any, expected: Any, device: str, is_structure_only: bool) -> str | None:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        is_same = type(found) is type(expected) and (found == expected or (found != found and expected != expected))
        return None if is_same or is_structure_only else f"{found!r:.40} instead of {expected!r:.40}"
    layouts = [(t.dtype, tuple(t.shape), t.device, t.layout, type(t)) for t in (found, expected)]
    if layouts[0] != layouts[1]:
        return f"{layouts[0]} instead of {layouts[1]}"
    if expected.itemsize == 1 and expected.is_floating_point():
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)  # float8 knows no comparison
    if is_structure_only or (_is_dense(expected) and _are_equal(found, expected)):
        return None
    tolerance = _TOLERANCE.get(expected.dtype, _DEVICE_TOLERANCE[device])
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def _shared_memory(made: _Made) -> list[str]:
    """For each tensor of the result, the arguments whose memory it uses, and which part of it."""
    arguments = [(t.untyped_storage()._cdata, i) for i, t in enumerate(_dense_tensors(made.call))]
    return [
        f"{where} at {tensor.storage_offset()}{_strides_that_count(tensor)}"
        if (where := [i for storage, i in arguments if storage == tensor.untyped_storage()._cdata])
        else "no part"
        for tensor in _dense_tensors(made.result)
    ]


def _dense_tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value)[0] if _is_dense(leaf)]


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and type(leaf) is torch.Tensor


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _strides_that_count(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of dimensions with more than one element."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _are_equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    half = torch.complex32  # not every op is there for it
    return torch.equal(*(t.to(torch.complex64) if t.dtype is half else t for t in (found, expected)))
