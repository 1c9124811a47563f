"""What a function does to memory, seen by running it once on copies of its arguments.

A schema says which arguments an op writes to, and some ops do not keep to it: batch norm moves its statistics, a custom
op may write to anything. So every tensor that was there before the run is compared around every op that reads it, and
at the end if its memory was handed to somebody who needs no ops, such as numpy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.base import torch_compat
from piecegraph.base.compare import same_bits
from piecegraph.base.structure import each_once, flatten
from piecegraph.base.user_code import caller, user_line
from piecegraph.engine.eager_interception import ShownCalls
from piecegraph.errors import TraceError
from piecegraph.graph.example import Example
from piecegraph.graph.interception import off
from piecegraph.graph.signature import LayoutReader
from piecegraph.tape.reads import NESTED, shows_memory

_LAYOUT_READS = frozenset({torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset})
_VIEWS_OR_COPIES = frozenset(
    {torch.reshape, torch.flatten, torch.ravel}
    | {torch.Tensor.reshape, torch.Tensor.reshape_as, torch.Tensor.flatten, torch.Tensor.ravel, torch.Tensor.contiguous}
)
"""What they give shares memory with what they are given, or does not: that depends on strides."""
_aten = torch.ops.aten
_LAYOUT_OPS = frozenset({_aten.as_strided.default, _aten.as_strided_.default, _aten.as_strided_scatter.default})
"""What they read depends on how the tensor lies, and a tensor that was computed lies as what it was computed from."""

_ASKS_FOR_NESTED = _aten._nested_tensor_from_mask_left_aligned.default
"""Asked before a nested tensor is made of a mask. Then none is made in a trace, nor where anybody looks on, as here."""
_IS_NESTED = torch.Tensor.is_nested.__get__  # type: ignore[attr-defined]
_ENCODER = torch.nn.TransformerEncoder.forward.__code__
"""With ``mask_check=False`` it does not ask, but it reads ``is_nested`` where it is given a mask and may make one."""

ViewOp = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Watched:
    """One run of a function."""

    returned: Any
    inputs: tuple[torch.Tensor, ...]
    """The copies of the arguments that it worked on."""
    moved_calls: tuple[int, ...]
    """Arguments that show another part of memory since, or show it in another way."""
    written_calls: tuple[int, ...]
    """Arguments it wrote to."""
    written_state: tuple[torch.Tensor, ...]
    """Other memory it wrote to that was there before: whole storages."""
    left: tuple[torch.Tensor, ...]
    """What it left in the memory of written arguments and in the other, before that was put back."""
    layout_reader: LayoutReader | None
    """What did something that would be something else if tensors lay otherwise in memory."""
    views: dict[tuple[Any, ...], tuple[tuple[Any, ...], ViewOp]]
    """What is a view of an argument: its place in memory, that of the tensor it was made from, and how."""

    @property
    def devices(self) -> tuple[torch.device | None, ...]:
        """Where each leaf of the result lies; None for what is no tensor."""
        leaves, _, _ = flatten(self.returned, is_container=each_once())
        return tuple(leaf.device if isinstance(leaf, torch.Tensor) else None for leaf in leaves)

    def leaves(self, number: int) -> list[Any]:
        """The parts of the result, if it is one of so many: objects that the call made are taken apart or not."""
        for found in (flatten(self.returned)[0], flatten(self.returned, is_container=each_once())[0]):
            if len(found) == number:
                return found
        return []

    def same_place(self, leaf: Any) -> int | None:
        """Which argument a result is, if it is one."""
        if not torch_compat.has_memory(leaf):
            return None
        return next((i for i, tensor in enumerate(self.inputs) if place_of(tensor) == place_of(leaf)), None)

    def view_of_input(self, leaf: torch.Tensor) -> tuple[int, tuple[ViewOp, ...]] | None:
        """Which argument a result is a view of, and the ops that lead to it; None if it is none or cannot be told."""
        places = {place_of(tensor): i for i, tensor in enumerate(self.inputs)}
        chain: list[ViewOp] = [torch_compat.alias]  # another tensor, also where the place is the same
        place = place_of(leaf)
        while place not in places:
            if place not in self.views or len(chain) > len(self.views):
                return None
            place, view = self.views[place]
            chain.append(view)
        return places[place], tuple(reversed(chain))


def watch(call: Callable[[Sequence[torch.Tensor]], Any], example: Sequence[torch.Tensor]) -> Watched:
    """Run a function on copies of tensors. What it writes is put back, what it draws is drawn again."""
    with torch_compat.drawn_again(tensor.device for tensor in example):  # in the caller's mode: weights may be of it
        inputs = tuple(tensor.clone() for tensor in example)
        places = [place_of(tensor) for tensor in inputs]
        with writes_put_back(inputs) as seen:
            returned = call(inputs)
            seen.note_returned(returned)
            seen.refuse_attributes(returned)
            left = {storage: memory.clone() for storage, (memory, _) in seen.written().items()}
    index = {torch_compat.storage_id(tensor): i for i, tensor in enumerate(inputs)}
    written = sorted((index[storage], storage) for storage in seen.saved if storage in index)
    state = [storage for storage in seen.saved if storage not in index]
    return Watched(
        returned=returned,
        inputs=inputs,
        moved_calls=tuple(i for i, place in enumerate(places) if place_of(inputs[i]) != place),
        written_calls=tuple(number for number, _ in written),
        written_state=tuple(seen.saved[storage][0] for storage in state),
        left=tuple(left[storage] for storage in (*(storage for _, storage in written), *state)),
        layout_reader=seen.layout_reader,
        views=seen.views,
    )


@contextlib.contextmanager
def writes_put_back(inputs: Sequence[torch.Tensor]) -> Iterator[_Watch]:
    """Look at every op that runs inside, and put back at the end what it has written."""
    seen = _Watch(inputs)
    try:
        with ShownCalls(seen.run), off():
            yield seen
    finally:
        seen.restore()


def watch_example(function: Callable[..., Any], example: Example) -> Watched:
    """Run a function as in an example call."""

    def call(tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = example.with_tensors(tensors)
        return function(*args, **kwargs)

    return watch(call, example.tensors)


def refuse_moved(watched: Watched, example: Example) -> None:
    """Arguments that are other tensors after the call cannot be made so by a replay."""
    for index in watched.moved_calls:
        raise TraceError(
            "PG207",
            f"the shape, strides or memory of {example.signature.tensors[index].name} are changed in place",
            why="a replay works on copies of the arguments, and would leave the caller's tensor as it is",
            hint="return the view, or a new tensor, instead",
        )


class _Watch:
    """Sees every call of a run."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = {torch_compat.storage_id(tensor) for tensor in inputs}
        self._arguments = {id(tensor) for tensor in inputs}
        self._made: set[int] = set()
        """Storages that the run itself has made."""
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Storages that were written to, with what they held before."""
        self._shown: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Storages that may have been written to without an op, with what they held before."""
        self._is_looking = True
        """Not while it makes copies of its own."""
        self._drawn: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """Generators that an op was given, with where they were before."""
        self.layout_reader: LayoutReader | None = None
        self._views_or_copies: list[tuple[int, int, str, bool]] = []
        """What was given and what came of it, as storages, the line, and whether it did nothing."""
        self.views: dict[tuple[Any, ...], tuple[tuple[Any, ...], ViewOp]] = {}
        self._whole_ops = torch_compat.WholeOps()

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_looking:
            return function(*args, **kwargs)
        if function is _ASKS_FOR_NESTED or (function == _IS_NESTED and caller() is _ENCODER):
            raise RuntimeError(NESTED)
        self._save_generators(args, kwargs)
        if self._whole_ops.has(function, args, kwargs):
            return torch_compat.run_parts(self.run, function, args, kwargs)
        if function in _LAYOUT_READS or function in _LAYOUT_OPS:
            self._note_reader(str(user_line() or function.__name__), reads_numbers=True)
        if shows_memory(function, args):
            self._note_shown(args[0])
        if not torch_compat.is_op(function):
            returned = function(*args, **kwargs)
            if function in _VIEWS_OR_COPIES or kwargs.get("memory_format") is not None:
                self._note_view_or_copy(function, (args, kwargs), returned)
            return returned
        if torch_compat.is_made_of_data(function, args):
            self._made.add(torch_compat.storage_id(args[0]))
        written_args = torch_compat.written_args(function, args, kwargs)
        written = [
            (tensor, place_of(tensor))
            for argument in written_args
            for tensor in _tensors(argument)
            if torch_compat.storage_id(tensor) not in self._made
        ]
        for tensor, _ in written:
            self._save(tensor)
        tensors = _tensors((args, kwargs))
        outside = {torch_compat.storage_id(tensor): tensor for tensor in tensors}
        read = [(t, t.clone()) for s, t in outside.items() if s not in self._made and s not in self.saved]
        returned = function(*args, **kwargs)
        for tensor, place in written:
            if id(tensor) not in self._arguments:
                _refuse_reshaping(function, tensor, place)
        self._save_changed(read)
        results = _tensors(returned)
        made = {torch_compat.storage_id(result) for result in results} - set(outside)
        self._made |= made
        self._note_write(made, written_args)
        self._note_views(function, args, kwargs, tensors, results)
        return returned

    def _note_reader(self, line: str, *, reads_numbers: bool) -> None:
        """One that reads numbers asks for more than one that makes views."""
        if self.layout_reader is None or (reads_numbers and not self.layout_reader.reads_numbers):
            self.layout_reader = LayoutReader(line, reads_numbers)

    def _note_view_or_copy(self, function: Any, arguments: Any, returned: Any) -> None:
        given, came = (_tensors(value)[:1] for value in (arguments, returned))
        if given and came:
            storages = torch_compat.storage_id(given[0]), torch_compat.storage_id(came[0])
            did_nothing = storages[0] == storages[1] and given[0].stride() == came[0].stride()
            self._views_or_copies.append((*storages, str(user_line() or function.__name__), did_nothing))

    def _note_write(self, made: set[int], written: Any) -> None:
        """A write to what may be a view shows in what it may be a view of, or does not.

        Args:
            made: storages that are new, perhaps in the place of others that are gone.
            written: arguments that were written to.
        """
        if made and self._views_or_copies:
            self._views_or_copies = [each for each in self._views_or_copies if not made & set(each[:2])]
        storages = {torch_compat.storage_id(tensor) for tensor in _tensors(written)} if self._views_or_copies else set()
        for given, came, line, _ in self._views_or_copies:
            if storages & {given, came}:
                self._note_reader(line, reads_numbers=False)

    def note_returned(self, returned: Any) -> None:
        """A copy of an argument may be a view of another one, and what did nothing may copy another one.

        How views become copies is known where they are made.
        """
        storages = {torch_compat.storage_id(tensor) for tensor in _tensors(returned)}
        for given, came, line, did_nothing in self._views_or_copies:
            if came in storages and given in self._inputs and (given != came or did_nothing):
                self._note_reader(line, reads_numbers=False)

    def refuse_attributes(self, returned: Any) -> None:
        """Raise if a tensor that the run made has attributes of its own: those of later calls would have none."""
        for leaf in flatten(returned)[0]:
            if torch_compat.has_memory(leaf) and torch_compat.storage_id(leaf) in self._made:
                own = [name for name in vars(leaf) if not name.startswith("_")]
                if own:
                    raise RuntimeError(f"a result has an attribute of its own, {own[0]}, which no replay would give it")

    def _save_changed(self, read: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Find what an op has written that does not say so.

        It may have written to more than shows, as what was there before: statistics that were zero of rows that are.
        So all that it was given is taken for written, except for arguments, which a replay would copy back.
        """
        changed = [not same_bits(tensor, before) for tensor, before in read]
        for (tensor, before), is_changed in zip(read, changed, strict=True):
            if is_changed:
                after = tensor.clone()
                tensor.copy_(before)
                self._save(tensor)
                tensor.copy_(after)
            elif any(changed) and torch_compat.storage_id(tensor) not in self._inputs:
                self._save(tensor)

    def _note_views(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        bases = [t for t in tensors if torch_compat.storage_id(t) in self._inputs]
        if len(bases) != 1 or len(tensors) != 1:
            return
        for number, result in enumerate(results):
            if torch_compat.storage_id(result) == torch_compat.storage_id(bases[0]):
                self.views.setdefault(
                    place_of(result), (place_of(bases[0]), _view_op(function, args, kwargs, bases[0], number))
                )

    def _save(self, tensor: torch.Tensor) -> None:
        storage, memory = torch_compat.storage_id(tensor), torch_compat.memory_of(tensor)
        if storage not in self.saved:
            self.saved[storage] = self._shown.get(storage) or (memory, memory.clone())

    def _note_shown(self, tensor: torch.Tensor) -> None:
        storage = torch_compat.storage_id(tensor)
        if storage in self._made or storage in self.saved or storage in self._shown:
            return
        self._is_looking = False
        try:
            memory = torch_compat.memory_of(tensor)
            self._shown[storage] = memory, memory.clone()
        finally:
            self._is_looking = True

    def _save_generators(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Those of devices are put back around a run. One that the user made is known when it is first drawn from."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and torch_compat.generator_id(value) not in self._drawn:
                self._drawn[torch_compat.generator_id(value)] = value, value.get_state()
                torch_compat.note_generator(value)

    def written(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Storages that were written to, also without an op, with what they held before."""
        for storage, (memory, before) in self._shown.items():
            if not same_bits(memory, before):
                self.saved.setdefault(storage, (memory, before))
        return self.saved

    def first_unknown(self, known: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Memory that was written to and belongs to none of these tensors."""
        expected = self._inputs | {torch_compat.storage_id(tensor) for tensor in known}
        return next((memory for storage, (memory, _) in self.written().items() if storage not in expected), None)

    def restore(self) -> None:
        for memory, value in self.written().values():
            memory.copy_(value)
        for generator, state in self._drawn.values():
            generator.set_state(state)


def _view_op(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: torch.Tensor, number: int) -> ViewOp:
    leaves, _, structure = flatten((args, kwargs))
    marked = [_BASE if leaf is base else leaf for leaf in leaves]

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        own_args, own_kwargs = structure.build(iter([tensor if leaf is _BASE else leaf for leaf in marked]))
        return _tensors(function(*own_args, **own_kwargs))[number]

    return apply


_BASE = object()


def _tensors(value: Any) -> list[torch.Tensor]:
    """Those that hold the data of a value: a write to a nested tensor is one to what it is made of."""
    kind = type(value)
    if kind in _NO_TENSORS:
        return []
    if kind is tuple or kind is list:
        return [tensor for part in value for tensor in _tensors(part)]
    if kind is dict:
        return [tensor for part in value.values() for tensor in _tensors(part)]
    leaves = [value] if isinstance(value, torch.Tensor) else flatten(value)[0]
    return [part for leaf in leaves for part in torch_compat.parts_with_memory(leaf)]


_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format})
"""What most other arguments of ops are."""


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how it is read."""
    layout = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return torch_compat.storage_id(tensor), *layout


def _refuse_reshaping(function: Any, tensor: torch.Tensor, place: tuple[Any, ...]) -> None:
    """A weight that got another shape in place, by ``t_()``, gets its own back, and it is an error: every run made for
    recording would change it once more, and no replay would.
    """
    storage, offset, size, stride, *_ = place
    if torch_compat.storage_id(tensor) == storage and place_of(tensor) != place:
        tensor.as_strided_(size, stride, offset)
        raise TraceError(
            "PG207",
            f"{torch_compat.qualified_name(function)} changes the shape of a weight in place",
            where=str(user_line() or ""),
            why="a replay reads weights as they were recorded",
            hint="use the op that returns a view: t() for t_()",
            line=str(user_line() or ""),
        )
