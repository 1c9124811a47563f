"""A graph device for a CPU: captures are call lists, replays re-execute them on the memory they were recorded with.

It keeps what makes CUDA graphs hard. A replay runs no Python of the user's and reads the addresses of the recording;
memory that nobody held when a capture began may have been recycled for it, so it is filled with NaN before that
capture is replayed; between sizes the whole pool is. What passes here keeps the rules of Note [Pool lifetime].
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.origin import GraphNode
from piecegraph.base.structure import flatten
from piecegraph.tape.device import CapturedGraph
from piecegraph.tape.nodes import SwitchedNodes
from piecegraph.tape.reads import reads_data

_POISON = 0xFF  # NaN in every floating point type, -1 in every signed integer


@dataclass
class _Block:
    """Memory of the pool, and whether anybody still holds the tensors that were handed out over it."""

    memory: torch.Tensor
    is_held: Callable[[], bool] = field(default=lambda: True)

    def poison(self) -> None:
        # Not by an op: these are filled by the thousand, and every op passes what watches the recording.
        ctypes.memset(self.memory.data_ptr(), _POISON, self.memory.numel())

    def take(self, tensor: torch.Tensor) -> None:
        """Have the memory hold what a tensor's storage does."""
        storage = tensor.untyped_storage()
        assert storage.nbytes() == self.memory.numel(), "a replay made more or less than was recorded"
        ctypes.memmove(self.memory.data_ptr(), storage.data_ptr(), storage.nbytes())


@dataclass
class _Call:
    """One recorded call, and where its fresh results go."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[tuple[int, _Block]]
    """(position among the result's tensors, block)."""
    is_on: bool = True
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """What it was recorded under: a function may change it inside, and a kernel that was captured would not know."""

    def replay(self) -> None:
        with _default_dtype(self.default_dtype):
            tensors = _tensors(self.function(*self.args, **self.kwargs))
        for position, block in self.results:
            block.take(tensors[position])


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is not before:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        if dtype is not before:
            torch.set_default_dtype(before)


class _CallNodes(SwitchedNodes):
    """The calls of a capture as the nodes of a graph."""

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls

    def describe(self) -> tuple[GraphNode, ...]:
        return tuple(GraphNode("op", _name_of(call.function), None, None, None) for call in self._calls)

    def switch(self, index: int, *, on: bool) -> None:
        self._calls[index].is_on = on
        self._note(index, on=on)


class SimulatedGraphs:
    """A :class:`~piecegraph.tape.device.GraphDevice` without a GPU."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        """Of the size being recorded."""
        self._older: list[_Block] = []
        """Of sizes recorded before, which share the memory."""
        self._addresses: set[int] = set()
        self._calls: list[_Call] | None = None
        self._captured: list[_Call] | None = None
        """The same, also while one of them runs."""
        self._keeps_nodes = False
        self._recycled: list[_Block] = []
        self._random_state = torch.empty(0)
        """Of the random numbers, behind the last call that was recorded."""
        self._overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Memory that the capture under way has written to, and what was in it before."""

    @contextlib.contextmanager
    def session(self, *, tidies: bool = True) -> Iterator[None]:
        with torch_compat.shown_ops(_Watch(self)):
            yield

    @property
    def is_capturing(self) -> bool:
        return self._calls is not None

    def begin(self, *, keep_nodes: bool) -> None:
        assert not self.is_capturing, "begin() inside a capture"
        self._calls = self._captured = []
        self._keeps_nodes = keep_nodes
        self._random_state = torch.get_rng_state()
        older = self._older if not self._blocks else []  # recycled once, by the first capture of a size
        self._recycled = [block for block in (*older, *self._blocks) if not block.is_held()]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Recorded as a whole: the kernels of a compiled piece are not seen one by one."""
        return self.record(function, args, kwargs)

    def num_nodes(self) -> int | None:
        return None if self._captured is None else len(self._captured)

    def end(self) -> CapturedGraph | None:
        calls, recycled = self._calls, self._recycled
        assert calls is not None, "end() without begin()"
        self.abandon()

        def replay() -> None:
            for block in recycled:
                block.poison()
            with torch.no_grad():
                for call in calls:
                    if call.is_on:
                        call.replay()

        return CapturedGraph(replay, _CallNodes(calls) if self._keeps_nodes else None) if calls else None

    def abandon(self) -> None:
        self._calls, self._captured, self._recycled = None, None, []
        for memory, before in self._overwritten.values():  # a capture executes nothing, a replay does
            memory.copy_(before)
        self._overwritten.clear()

    def end_size(self) -> None:
        self._older += self._blocks
        self._blocks = []
        for block in self._older:
            block.poison()

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call now, move fresh results into the pool, and remember the call."""
        _refuse_wrappers(_tensors((args, kwargs)))
        calls, self._calls = self._calls, None  # what happens inside is part of this call, and not recorded again
        assert calls is not None, "not capturing"
        self._save_written(function, args, kwargs)
        try:
            self._check_random_state()
            leaves, _, structure = flatten(function(*args, **kwargs))
            _refuse_wrappers(leaves)
            results = self._move_fresh(leaves, {torch_compat.storage_id(t) for t in _tensors((args, kwargs))})
            calls.append(_Call(function, _borrow(args, self), _borrow(kwargs, self), results))
            self._random_state = torch.get_rng_state()
        finally:
            self._calls = calls
        return structure.build(iter(leaves))

    def _check_random_state(self) -> None:
        """Only recorded calls may draw random numbers: a replay would not repeat what Python does to the generator."""
        if not torch.equal(self._random_state, torch.get_rng_state()):
            raise RuntimeError("operation not permitted when stream is capturing: random numbers were seeded")

    def _save_written(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in _tensors(torch_compat.written_args(function, args, kwargs)):
            if torch_compat.storage_id(tensor) not in self._overwritten:
                memory = torch_compat.bytes_of(tensor)
                self._overwritten[torch_compat.storage_id(tensor)] = memory, memory.clone()

    def _move_fresh(self, leaves: list[Any], held: set[int]) -> list[tuple[int, _Block]]:
        """Replace the tensors among the leaves that are not views of held memory by tensors in the pool."""
        moved: dict[int, torch.Tensor] = {}
        results: list[tuple[int, _Block]] = []
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for position, (i, leaf) in enumerate(tensors):
            storage = torch_compat.storage_id(leaf)
            if storage in held or _is_only_described(leaf):
                continue
            if storage not in moved:
                moved[storage], block = self._move(leaf)
                results.append((position, block))
            leaves[i] = torch_compat.over(moved[storage].untyped_storage(), leaf)
        return results

    def _move(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Block]:
        """A tensor over a new block of the pool that holds the tensor's whole storage."""
        block = _Block(torch_compat.bytes_of(tensor).clone())
        self._blocks.append(block)
        self._addresses.add(block.memory.data_ptr())
        handed_out = torch_compat.non_owning(block.memory)
        block.is_held = torch_compat.storage_is_alive(handed_out)
        return handed_out, block

    def owns(self, tensor: torch.Tensor) -> bool:
        return not _is_only_described(tensor) and tensor.untyped_storage().data_ptr() in self._addresses

    def allocate_like(self, tensor: torch.Tensor) -> torch.Tensor:
        fresh = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        owner, _ = self._move(fresh)
        return torch_compat.over(owner.untyped_storage(), fresh)

    def reserved_bytes(self) -> int:
        return sum(block.memory.numel() for block in (*self._older, *self._blocks))

    def free_bytes(self) -> int | None:
        return None

    def use_caller_stream(self) -> None:
        pass

    def seconds_of(self, function: Callable[[], Any]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start


class _Watch(torch_compat.WatchingMode):
    """Records the ops that run between breaks, for code that is captured as it runs."""

    def __init__(self, device: SimulatedGraphs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not self._device.is_capturing:
            return func(*args, **(kwargs or {}))
        if reads_data(func, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func} reads data on the host")
        return self._device.record(func, args, kwargs or {})


def _refuse_wrappers(values: Sequence[Any]) -> None:
    """What a nested tensor and its like are made of is out of sight here."""
    for value in values:
        is_tensor = isinstance(value, torch.Tensor) and not _is_only_described(value)
        if is_tensor and not torch_compat.has_memory(value):
            kind = f"{type(value).__name__} ({value.layout})"
            raise RuntimeError(f"simulated graphs cannot hold a {kind}, which has no memory of its own")


def _is_only_described(tensor: torch.Tensor) -> bool:
    """Whether there is nothing that a replay could write."""
    return tensor.is_meta or torch_compat.is_only_zeros(tensor)


def _name_of(function: Any) -> str:
    return torch_compat.qualified_name(function) or getattr(function, "__qualname__", type(function).__name__)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):  # what most ops return
        return [value]
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _borrow(value: Any, device: SimulatedGraphs) -> Any:
    """Arguments as a graph keeps them: addresses in the pool, without owning them."""
    leaves, _, structure = flatten(value)
    return structure.build(
        iter([torch_compat.non_owning(v) if isinstance(v, torch.Tensor) and device.owns(v) else v for v in leaves])
    )
