"""One program and its calls, run plain and compiled: what differs?

What a caller can see is written down after every call, under a label: results, what they share memory with, arguments,
module state; and at the end the results of all calls once more. The two lists must agree. Refusing with a
``PiecegraphError`` is fine; any other exception that the plain run does not raise is a fault.

The text of this file is the head of every script that is written for a fault, so it needs torch and piecegraph alone.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: F401 - for programs
from torch import Tensor, nn

import piecegraph
from piecegraph.base.structure import flatten
from piecegraph.errors import PiecegraphError

DEVICE = "cpu"
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of the largest value. Data are small multiples of a quarter, so most of what is computed is exact."""


# --- what programs are made of


@torch.library.custom_op("pgfuzz::cut", mutates_args=())
def cut(x: Tensor) -> Tensor:
    """Between two graphs: a fresh tensor."""
    return x * 2 + 1


@torch.library.custom_op("pgfuzz::cut_two", mutates_args=())
def cut_two(x: Tensor) -> tuple[Tensor, Tensor]:
    """Between two graphs: two fresh tensors."""
    return x - 1, x.sum(0)


@torch.library.custom_op("pgfuzz::cut_into", mutates_args=("out",))
def cut_into(x: Tensor, out: Tensor) -> None:
    """Between two graphs: writes to an argument."""
    out.add_(x)


cut.register_fake(lambda x: torch.empty_like(x))
cut_two.register_fake(lambda x: (torch.empty_like(x), x.new_empty(x.shape[1:])))
cut_into.register_fake(lambda x, out: None)
CUTS = ["pgfuzz::cut", "pgfuzz::cut_two", "pgfuzz::cut_into"]


@piecegraph.eager_op
def eager_pair(x: Tensor) -> dict[str, Tensor]:
    """An eager op with a nested result."""
    return {"double": x * 2, "rows": x.sum(-1)}


@piecegraph.eager_op
def eager_into(x: Tensor, out: Tensor) -> Tensor:
    """An eager op that writes to an argument and returns it."""
    return out.add_(x)


def variants(device: str) -> dict[str, dict[str, Any]]:
    """The ways in which every program is compiled, by name."""
    common = {"backend": "eager", "on_fallback": "ignore", "splitting_ops": CUTS}
    graphs = {"direct": "auto", "simulated": "simulated"} if device == "cpu" else {"cuda": "auto"}
    found: dict[str, dict[str, Any]] = {
        f"{frontend}, {name}": {**common, "frontend": frontend, "options": {"graph_device": graph_device}}
        for frontend in ("trace", "breakable")
        for name, graph_device in graphs.items()
    }
    found["trace, simulated" if device == "cpu" else "trace, cuda"]["is_kept"] = True
    return found


class Layer(nn.Module):
    """One of several that differ in their weights alone."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.gain = number, 0.5
        self.lin = nn.Linear(4, 4)
        self.lin.load_state_dict({"weight": values(10 + number, 4, 4) / 4, "bias": values(20 + number, 4)})
        self.register_buffer("seen", values(30 + number, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(x).tanh() * self.gain


class Skeleton(nn.Module):
    """The parameters and buffers that programs may use."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(values(1, 4, 4))
        self.b = nn.Parameter(values(2, 4))
        self.lin = nn.Linear(4, 4)
        self.lin.load_state_dict({"weight": values(3, 4, 4), "bias": values(4, 4)})
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", values(5, 4))
        self.register_buffer("cache", values(6, 16, 4))
        self.layers = nn.ModuleList([Layer(number) for number in range(5)])


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small multiples of a quarter; small indices for integers."""
    numbers = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        made = numbers > 0
    elif not (dtype.is_floating_point or dtype.is_complex):
        made = (numbers % 3).to(dtype)
        made.view(-1)[:1] = 1  # nothing but what padding holds shows nothing when padding is tried
    elif dtype.is_complex:
        made = torch.complex(numbers / 4, numbers.flip(0) / 4).to(dtype)
    else:
        made = (numbers / 4).to(dtype)
    return made.to(DEVICE)


def tensors_of(value: Any) -> dict[str, Tensor]:
    """The tensors in a nested value, by path."""
    leaves, paths, _ = flatten(value)
    return {path: leaf for leaf, path in zip(leaves, paths, strict=True) if isinstance(leaf, Tensor)}


def strides_that_count(tensor: Tensor) -> tuple[int, ...]:
    """Those of dimensions with more than one element, of a tensor that has any."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride for stride, size in pairs if size > 1) if tensor.numel() else ()


# --- a run, and what was seen


class Run:
    """Makes the calls of a schedule and writes down what can be seen."""

    def __init__(self, function: Callable[..., Any], state: Callable[[], Mapping[str, Tensor]], keeps: bool) -> None:
        self._function = function
        self._state = state
        self._keeps = keeps
        """Whether results are valid after the next call."""
        self.is_dense = True
        """Whether all arguments were contiguous so far. A plan keeps the layouts of its first call: what comes out of
        other ones may lie otherwise, and a view() may work that plainly does not.
        """
        self._results: list[Any] = []
        self.seen: dict[str, Any] = {}
        self.error: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = tensors_of((args, kwargs))
        self.is_dense &= all(tensor.is_contiguous() for tensor in given.values())
        result = self._function(*args, **kwargs)
        call = f"call {len(self._results)}"
        owners = {**{f"argument {name}": tensor for name, tensor in given.items()}, **self._state()}
        leaves, paths, structure = flatten(result)
        self.seen[f"{call}: structure"] = str(structure)
        for path, leaf in zip(paths, leaves, strict=True):
            self.seen[f"{call}: result {path}"] = _copied(leaf)
            if isinstance(leaf, Tensor):
                self.seen[f"{call}: memory of result {path}"] = _shared(leaf, owners)
                if self.is_dense:
                    self.seen[f"{call}: layout of result {path}"] = strides_that_count(leaf)
        for name, owner in owners.items():
            self.seen[f"{call}: {name}"] = _copied(owner)
        self._results.append(result)
        return result

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Have a compiled function plan and record ahead."""
        if hasattr(self._function, "capture"):
            self._function.capture(*args, **kwargs)

    def poke(self, result: Any) -> None:
        """Write to a result, as its owner may. Always the same: results of one call may share memory or not."""
        for leaf in tensors_of(result).values():
            if leaf.is_floating_point() and not _overlaps_itself(leaf):
                leaf.fill_(7)

    def finish(self) -> None:
        """Look at every result once more."""
        for number, result in enumerate(self._results):
            if self._keeps or number == len(self._results) - 1:
                for path, leaf in tensors_of(result).items():
                    self.seen[f"afterwards: call {number}: result {path}"] = _copied(leaf)
        self.seen["afterwards: random numbers"] = torch.rand(2, device=DEVICE)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _overlaps_itself(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _shared(tensor: Tensor, owners: Mapping[str, Tensor]) -> list[str]:
    """What a result is, or shares its memory with."""
    address = tensor.untyped_storage().data_ptr()
    return [
        f"is {name}" if tensor is owner else f"views {name}"
        for name, owner in owners.items()
        if tensor is owner or (tensor.numel() and owner.untyped_storage().data_ptr() == address)
    ]


# --- the verdict


@dataclass(frozen=True)
class Verdict:
    """What came of running a program plain and compiled."""

    kind: Literal["same", "refused", "invalid", "different", "raised"]
    label: str = ""
    """Where the first difference is; the code of a refusal."""
    detail: str = ""
    num_calls: int = 0
    num_replayed: int = 0
    events: Mapping[str, int] = field(default_factory=dict)
    """What was lost, by code: calls that ran eagerly, or without graphs."""
    is_warm: bool = False
    """Whether a plan came from the disk."""

    @property
    def is_fault(self) -> bool:
        return self.kind in ("different", "raised")


_COUNTS = {"num_calls": "calls", "num_replayed": "replayed", "events": "events", "is_warm": "is_warm"}
"""What of a compiled model's statistics goes into a verdict."""


@dataclass(frozen=True)
class Case:
    """A program: how its model is made, how it is called, and how it is compiled."""

    make: Callable[[], Any]
    """A module or a function."""
    schedule: Callable[[Any, Run], None]
    """Is given the model, to change it, and a run, to call it."""
    arguments: Mapping[str, Any]
    """Those of ``compile``."""
    mode: Literal["no_grad", "inference"] = "no_grad"
    door: Literal["compile", "original", "install"] = "compile"
    """What changes between calls go through: what ``compile`` returned, the original of it, or an installed module."""

    def play(self, arguments: Mapping[str, Any] | None) -> tuple[Run, Mapping[str, Any]]:
        """Run the schedule on a fresh model, compiled if there are arguments for that. Also returns its ``stats()``."""
        original = self.make()
        if isinstance(original, nn.Module):
            original.to(DEVICE)
        compiled: Any = None
        if arguments is not None:
            compiled = (piecegraph.install if self.door == "install" else piecegraph.compile)(original, **arguments)
        called = original if compiled is None or self.door == "install" else compiled
        keeps = arguments is None or arguments.get("options", {}).get("clone_outputs", True)
        run = Run(called, lambda: _state(original), keeps)
        torch.manual_seed(0)
        with warnings.catch_warnings(), torch.inference_mode() if self.mode == "inference" else torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                self.schedule(called if self.door == "compile" else original, run)
                run.finish()
            except Exception as error:
                run.error = error
        return run, {} if compiled is None else {**compiled.stats(), "is_warm": "cache: warm" in compiled.explain()}

    def judge(self, *, is_kept: bool = False, **changes: Any) -> Verdict:
        """Compare a compiled run with a plain one.

        Args:
            is_kept: whether its plans are kept on the disk, and a second run, which finds them there, is compared, too.
            changes: arguments of ``compile`` that are not the program's own; ``options`` are added to its options.
        """
        options = {**self.arguments.get("options", {}), **changes.pop("options", {})}
        arguments = {**self.arguments, **changes, "options": options}
        if DEVICE != "cpu" and (error := self._error_on_cpu()) is not None:
            return Verdict("invalid", detail=repr(error))
        expected, _ = self.play(None)
        if not is_kept:
            with mock.patch.dict("os.environ", PIECEGRAPH_CACHE="off"):
                return self._compare(expected, arguments)
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", PIECEGRAPH_CACHE=folder):
            verdict = self._compare(expected, arguments)
            if verdict.kind != "same":
                return verdict
            again = self._compare(expected, arguments)
            return again if again.kind == "same" else replace(again, kind="different", label=f"kept: {again.label}")

    def _compare(self, expected: Run, arguments: Mapping[str, Any]) -> Verdict:
        found, stats = self.play(arguments)
        label, detail = _first_difference(found, expected)
        counts = {name: stats[key] for name, key in _COUNTS.items()}
        if label:
            return Verdict("different", label, detail, **counts)
        if expected.error is not None:
            return Verdict("invalid", detail=repr(expected.error), **counts)
        if isinstance(found.error, PiecegraphError):
            return Verdict("refused", found.error.code, str(found.error), **counts)
        if found.error is not None:
            return Verdict("raised", type(found.error).__name__, str(found.error), **counts)
        return Verdict("same", **counts)

    def _error_on_cpu(self) -> Exception | None:
        """What the plain run raises there: an index out of range ends the process where a GPU finds it."""
        global DEVICE
        device, DEVICE = DEVICE, "cpu"
        try:
            return self.play(None)[0].error
        finally:
            DEVICE = device


def _state(model: Any) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        return {}
    return {f"state {name}": tensor for name, tensor in model.state_dict(keep_vars=True).items()}


def _first_difference(found: Run, expected: Run) -> tuple[str, str]:
    """Label and detail; both empty if all that was seen agrees. A refused run is compared as far as it came."""
    for label, value in found.seen.items():
        if label not in expected.seen:
            break
        why = difference(value, expected.seen[label])
        if why is not None:
            return label, why
    if expected.error is not None and expected.is_dense and len(found.seen) > len(expected.seen):
        return "error", f"the plain run raises {expected.error!r}"
    return "", ""


def difference(found: Any, expected: Any) -> str | None:
    """What differs between two values seen, or None."""
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        if isinstance(expected, torch.nn.Module):  # each run has a model of its own
            found, expected = repr(found), repr(expected)
        is_same = type(found) is type(expected) and (found == expected or found != found)
        return None if is_same else f"{found!r} instead of {expected!r}"
    about = [f"{t.dtype} {tuple(t.shape)}" for t in (found, expected)]
    if about[0] != about[1]:
        return f"{about[0]} instead of {about[1]}"
    # Torch cannot compare half-precision complex numbers as they are.
    if not found.numel() or (expected.dtype is not torch.complex32 and torch.equal(found, expected)):
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (torch.view_as_real(t.to(wide)) if wide.is_complex else t.to(wide) for t in (found, expected))
    limit = TOLERANCE.get(expected.dtype, 1e-4) * max(1.0, float(b.nan_to_num(0, 0, 0).abs().max()))
    if torch.allclose(a, b, rtol=0, atol=limit, equal_nan=True):
        return None
    return f"\n{found}\ninstead of\n{expected}"


def show(case: Case, variant: str) -> int:
    """Print what came of a program; 1 if it is a fault."""
    verdict = case.judge(**variants(DEVICE)[variant])
    print(f"{variant}: {verdict.kind} {verdict.label}\n{verdict.detail}")
    return int(verdict.is_fault)
