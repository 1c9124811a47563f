"""What a plan expects of a call, and the check that a call is of that kind.

An example call comes in; a :class:`Signature` comes out. ``match`` then takes a call apart into its tensors and
sizes, or says which argument does not fit. This check stands in for Dynamo's guards and is the only one made at
replay.
"""

from __future__ import annotations

import enum
import inspect
import operator
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from piecegraph.base.structure import Structure, attributes, flatten
from piecegraph.errors import TraceError
from piecegraph.graph.dims import DimRequest, EarlierShape

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_MAX_KNOWN = 4096
_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type, types.FunctionType,
    types.BuiltinFunctionType, types.CodeType, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.nn.Module, re.Pattern,
)  # fmt: skip
_BY_VALUE = (int, float, complex, str, bytes)


class LayoutMisfit(str):
    """Why a call does not fit that differs from the planned ones only in how a tensor lies in memory."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LayoutReader:
    """A line of a function that does something else if tensors lie otherwise in memory."""

    line: str
    reads_numbers: bool
    """Whether it asks for strides or the offset; else it gives a view or a copy, depending on strides."""

    def misfit(self, name: str, value: torch.Tensor, strides: Sequence[int]) -> LayoutMisfit | None:
        """Why a tensor that should have these strides will not do."""
        found = value.stride()
        if self.reads_numbers:
            if found == strides and not value.storage_offset():
                return None
            place = f"lies {value.storage_offset()} elements behind the beginning of its memory"
            return LayoutMisfit(f"{name} has strides {found} and {place}, which {self.line} asks for")
        if all(a == b or size < 2 for a, b, size in zip(found, strides, value.shape, strict=True)):
            return None
        reason = f"on which it depends whether {self.line} gives a view or a copy"
        return LayoutMisfit(f"{name} has strides {found}, {reason}")


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """What is expected of one tensor argument."""

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    """As in the example; dynamic dimensions vary."""
    dim_order: tuple[int, ...]
    """Dimensions from the slowest to the fastest in memory: static buffers keep the example's layout."""
    dynamic: tuple[tuple[int, int], ...] = ()
    """(dimension, index of its size)."""
    fixed: tuple[tuple[int, int], ...] = ()
    """(dimension, size) of all others."""
    address: int | None = None
    """Where the data must lie, for inputs declared static."""
    strides: tuple[int, ...] | None = None
    """And how."""
    layout_reader: LayoutReader | None = None
    """Tensors must lie in memory as the buffers do, because of this."""
    is_plain: bool = True
    """Whether neither of these two has to be checked."""

    def show(self, size_names: Sequence[str]) -> str:
        names = {dim: size_names[size] for dim, size in self.dynamic}
        dims = ", ".join(names.get(d, str(n)) for d, n in enumerate(self.shape))
        return f"{self.name}[{dims}] {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Constant:
    """An argument that is not a tensor: part of the plan, must stay as it was."""

    name: str
    value: Any

    def fits(self, value: Any) -> bool:
        return is_same_constant(value, self.value)


Leaf = TensorLeaf | Constant


class Call(NamedTuple):
    """A call that fits a plan: its tensors in the plan's order, its sizes, and the arguments as they were passed.

    A named tuple, because one is made at every replay.
    """

    tensors: list[torch.Tensor]
    sizes: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Binder:
    """Brings the arguments of a call into one order, however they were passed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self._parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # a builtin: any arguments
            self._parameters = inspect.signature(lambda *args, **kwargs: None).parameters
        self._orders: dict[Any, tuple[tuple[str, ...], tuple[int, ...] | None, list[Any]]] = {}
        """(names, order, defaults) for each way to pass arguments (their number, and the names of those that have one);
        no order if they lie as they were passed.
        """

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, ...], list[Any]]:
        """Names and values of all arguments, defaults included, in the order of the parameters.

        >>> Binder(lambda x, y=1, *, z=2: None).bind((5,), {"z": 3})
        (('x', 'y', 'z'), [5, 1, 3])
        """
        shape = (len(args), tuple(kwargs)) if kwargs else len(args)
        if shape not in self._orders:
            self._orders[shape] = self._order(len(args), tuple(kwargs))
        names, order, defaults = self._orders[shape]
        given = [*args, *kwargs.values(), *defaults] if kwargs or defaults else [*args]
        return names, given if order is None else [given[i] for i in order]

    def unbind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Other values in place of those :meth:`bind` found, passed the same way as in this call, and in place of
        defaults.
        """
        names, order, defaults = self._orders[(len(args), tuple(kwargs)) if kwargs else len(args)]
        given: list[Any] = [*args, *kwargs.values()]
        others: dict[str, Any] = {}
        for name, index, value in zip(names, order or range(len(values)), values, strict=True):
            if index < len(given):
                given[index] = value
            elif value is not defaults[index - len(given)]:
                others[name] = value
        by_place = [others.pop(name, default) for name, default in self._placed_defaults(len(args), others)]
        by_name = dict(zip(kwargs, given[len(args) :], strict=True))
        return (*given[: len(args)], *by_place), by_name | others

    def _placed_defaults(self, num_args: int, others: dict[str, Any]) -> list[tuple[str, Any]]:
        """Defaults of parameters that have no name for callers, up to the last that is to have another value."""
        placed = [each for each in self._parameters.values() if each.kind is each.POSITIONAL_ONLY][num_args:]
        num_needed = max((number + 1 for number, each in enumerate(placed) if each.name in others), default=0)
        return [(each.name, each.default) for each in placed[:num_needed]]

    def _order(
        self, num_args: int, keywords: tuple[str, ...]
    ) -> tuple[tuple[str, ...], tuple[int, ...] | None, list[Any]]:
        signature = inspect.Signature(list(self._parameters.values()))
        positions = {name: num_args + i for i, name in enumerate(keywords)}
        bound = signature.bind(
            *range(num_args), **positions
        )  # TypeError for a wrong call, as the function itself would
        names: list[str] = []
        order: list[int] = []
        defaults: list[Any] = []
        for name, parameter in self._parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                indices = bound.arguments.get(name, ())
                names += [f"{name}[{i}]" for i in range(len(indices))]
                order += indices
            elif parameter.kind is parameter.VAR_KEYWORD:
                extra = bound.arguments.get(name, {})  # in the order they were passed in, which the function sees
                names += extra
                order += extra.values()
            elif name in bound.arguments:
                names.append(name)
                order.append(bound.arguments[name])
            else:
                names.append(name)
                order.append(num_args + len(keywords) + len(defaults))
                defaults.append(parameter.default)
        return tuple(names), None if order == list(range(len(order))) else tuple(order), defaults


@dataclass(frozen=True, slots=True)
class Signature:
    """What a plan expects of a call."""

    names: tuple[str, ...]
    arguments: tuple[Leaf | tuple[Structure, tuple[Leaf, ...]], ...]
    """One entry for each name: a leaf, or a container with its leaves."""
    size_names: tuple[str, ...]
    training: bool | None
    """The module's mode, None for a function."""
    _plain: tuple[tuple[torch.dtype, torch.device], ...] | None = field(init=False, repr=False, compare=False)
    """Type and device of each argument, if all of them are tensors of which nothing else but the shape is looked at."""
    _known: dict[tuple[torch.Size, ...], tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """The sizes of shapes that such calls had."""
    _has_objects: bool = field(init=False, repr=False, compare=False)
    """Whether objects of plain classes are among the arguments: to look for them takes time."""

    def __post_init__(self) -> None:
        leaves = [leaf for leaf in self.arguments if type(leaf) is TensorLeaf and leaf.is_plain]
        plain = tuple((leaf.dtype, leaf.device) for leaf in leaves) if len(leaves) == len(self.arguments) else None
        object.__setattr__(self, "_plain", plain)
        object.__setattr__(self, "_known", {})
        structures = [argument[0] for argument in self.arguments if isinstance(argument, tuple)]
        object.__setattr__(self, "_has_objects", any(structure.has_objects for structure in structures))

    @property
    def tensors(self) -> tuple[TensorLeaf, ...]:
        flat: list[Leaf] = []
        for argument in self.arguments:
            flat += argument[1] if isinstance(argument, tuple) else (argument,)
        return tuple(leaf for leaf in flat if isinstance(leaf, TensorLeaf))

    def varied(self, names: tuple[str, ...], values: list[Any], training: bool | None) -> dict[str, EarlierShape]:
        """The planned shapes, if a call differs from the planned ones in sizes and in nothing else."""
        if isinstance(self._for_any_size().match(names, values, training, (), {}), str):
            return {}
        return {leaf.name: EarlierShape(leaf.shape, frozenset(dim for dim, _ in leaf.dynamic)) for leaf in self.tensors}

    def misfit(self, names: tuple[str, ...], values: list[Any], training: bool | None) -> str:
        """Why a call does not fit, empty if it does. Where that is not by sizes alone, they are not what is told."""
        found = self.match(names, values, training, (), {})
        other = self._for_any_size().match(names, values, training, (), {})
        is_told = isinstance(other, str) and not isinstance(other, LayoutMisfit)
        return str(other) if is_told else found if isinstance(found, str) else ""

    def _for_any_size(self) -> Signature:
        def loosen(leaf: Leaf) -> Leaf:
            return replace(leaf, fixed=(), dynamic=()) if isinstance(leaf, TensorLeaf) else leaf

        return _map_leaves(self, loosen)

    def match(
        self,
        names: tuple[str, ...],
        values: list[Any],
        training: bool | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Call | str:
        """Take a call apart, or say what does not fit. ``names`` and ``values`` are what a :class:`Binder` made of
        it.
        """
        if training is self.training and names == self.names and self._plain is not None:
            shapes = []
            for (dtype, device), value in zip(self._plain, values, strict=True):
                if type(value) not in _PLAIN_TENSORS or value.dtype is not dtype or value.device != device:
                    break
                if value.layout is not _STRIDED or value.is_nested:
                    break
                shapes.append(value.shape)
            sizes = self._known.get(tuple(shapes))
            if sizes is not None:
                return Call(values, sizes, args, kwargs)
        found = self._take_apart(names, values, training, args, kwargs)
        if self._plain is not None and isinstance(found, Call):
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[tuple(value.shape for value in values)] = found.sizes
        return found

    def _take_apart(
        self,
        names: tuple[str, ...],
        values: list[Any],
        training: bool | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Call | str:
        if names != self.names:
            return f"called with ({', '.join(names)}), planned for ({', '.join(self.names)})"
        if training is not self.training:
            return f"the module is in {'training' if training else 'eval'} mode, planned for the other"
        tensors: list[torch.Tensor] = []
        sizes: list[int] = [-1] * len(self.size_names)
        for argument, value in zip(self.arguments, values, strict=True):
            reason = _match_one(argument, value, tensors, sizes, self._has_objects)
            if reason is not None:
                return reason
        return Call(tensors, tuple(sizes), args, kwargs)


def _match_one(
    argument: Leaf | tuple[Structure, tuple[Leaf, ...]],
    value: Any,
    tensors: list[torch.Tensor],
    sizes: list[int],
    has_objects: bool,
) -> str | None:
    """Match one argument of any kind; adds its tensors. Says why it does not fit."""
    if not isinstance(argument, tuple):
        if type(argument) is TensorLeaf:
            tensors.append(value)
        return _misfit(argument, value, sizes)
    structure, specs = argument
    leaves, _, found = flatten_arguments(value) if has_objects else flatten(value)
    if found != structure:
        return f"{specs[0].name if specs else 'a container'} has another structure than planned"
    tensors += [leaf for leaf, spec in zip(leaves, specs, strict=True) if type(spec) is TensorLeaf]
    return next(filter(None, map(_misfit, specs, leaves, [sizes] * len(leaves))), None)


def _misfit(leaf: Leaf, value: Any, sizes: list[int]) -> str | None:
    """Why a value does not fit its leaf; fills in the sizes it carries."""
    if type(leaf) is Constant:
        shown = "a Tensor" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
        return None if leaf.fits(value) else f"{leaf.name} is {shown}, planned for {leaf.value!r:.80}"
    assert type(leaf) is TensorLeaf
    if type(value) not in _PLAIN_TENSORS:
        return f"{leaf.name} is a {type(value).__name__}, planned for a Tensor"
    if value.layout is not _STRIDED or value.is_nested:
        return f"{leaf.name} is {'nested' if value.is_nested else value.layout}, planned for a dense tensor"
    if value.dtype is not leaf.dtype:
        return f"{leaf.name} is {value.dtype}, planned for {leaf.dtype}"
    if value.device != leaf.device:
        return f"{leaf.name} is on {value.device}, planned for {leaf.device}"
    shape = value.shape
    if len(shape) != len(leaf.shape):
        return f"{leaf.name} has {len(shape)} dimensions, planned for {len(leaf.shape)}"
    for dim, size in leaf.fixed:
        if shape[dim] != size:
            return f"{leaf.name}.shape[{dim}] is {shape[dim]}, planned for {size}"
    for dim, index in leaf.dynamic:
        if sizes[index] == -1:
            sizes[index] = shape[dim]
        elif sizes[index] != shape[dim]:
            return f"{leaf.name}.shape[{dim}] is {shape[dim]}, but the same size is {sizes[index]} elsewhere"
    if leaf.address is not None and (value.data_ptr() != leaf.address or value.stride() != leaf.strides):
        return f"{leaf.name} is declared static but lies at another address than planned, or with other strides"
    if leaf.layout_reader is not None:
        return leaf.layout_reader.misfit(leaf.name, value, dense_strides(shape, leaf.dim_order))
    return None


_FOR_OBJECTS = "pass tensors, numbers, strings, None, and tuples, lists, dicts, dataclasses or plain objects of them"
_FOR_CACHES = "generate with piecegraph.LLM(path), which keeps a cache of its own, or without one (use_cache=False)"


def make_signature(
    names: tuple[str, ...],
    values: Sequence[Any],
    requests: Sequence[DimRequest],
    static_inputs: Sequence[str],
    training: bool | None,
) -> Signature:
    """Describe an example call. Raises PG203 for an argument whose changes could not be noticed."""
    groups = tuple(dict.fromkeys(request.group for request in requests))
    dynamic: dict[int, dict[int, int]] = {}
    for request in requests:
        dynamic.setdefault(request.leaf, {})[request.dim] = groups.index(request.group)
    arguments: list[Leaf | tuple[Structure, tuple[Leaf, ...]]] = []
    position = 0
    for name, value in zip(names, values, strict=True):
        leaves, paths, structure = flatten_arguments(value, name)
        specs = tuple(
            _leaf(path, leaf, dynamic.get(position + i, {}), path in static_inputs)
            for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True))
        )
        position += len(leaves)
        arguments.append(specs[0] if structure.is_leaf else (structure, specs))
    return Signature(names, tuple(arguments), groups, training)


def _leaf(name: str, value: Any, dynamic: dict[int, int], is_static: bool) -> Leaf:
    if isinstance(value, torch.Tensor):
        is_dense_kind = value.layout is _STRIDED and not value.is_quantized and not value.is_nested
        if type(value) not in _PLAIN_TENSORS or not is_dense_kind:
            raise TraceError(
                "PG203",
                f"{name} is a {type(value).__name__} of layout {'nested' if value.is_nested else value.layout}",
                why="only plain dense tensors have fixed addresses",
            )
        shape = tuple(value.shape)
        strides = value.stride()
        order = sorted(range(len(shape)), key=lambda d: (-strides[d], d)) if is_dense(value) else range(len(shape))
        return TensorLeaf(
            name=name,
            dtype=value.dtype,
            device=value.device,
            shape=shape,
            dim_order=tuple(order),
            dynamic=tuple(dynamic.items()),
            fixed=tuple((d, n) for d, n in enumerate(shape) if d not in dynamic),
            address=value.data_ptr() if is_static else None,
            strides=strides if is_static else None,
            is_plain=not is_static,
        )
    if is_constant(value) and not has_attributes(value):
        return Constant(name, value)
    raise TraceError(
        "PG203",
        f"{name} is a {type(value).__name__}",
        why="a plan cannot see changes inside such an object",
        hint=_FOR_CACHES if type(value).__module__.startswith("transformers.cache") else _FOR_OBJECTS,
    )


def flatten_arguments(value: Any, path: str = "") -> tuple[list[Any], list[str], Structure]:
    """Take arguments apart. Objects that carry tensors between parts of a model are containers among them."""
    return flatten(value, path, is_container=_carries_tensors)


def _carries_tensors(value: Any) -> bool:
    """Whether an object holds tensors, and nothing that could change unseen: a cache, whose parts are objects again,
    is a state and no container.
    """
    if is_constant(value):
        return False
    held = flatten(attributes(value))[0]
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in held]
    return any(is_tensor) and all(map(operator.or_, is_tensor, map(is_constant, held)))


def is_constant(value: Any) -> bool:
    """Whether a value can be part of a plan: compared by value or identity, never changed from outside."""
    return isinstance(value, _CONSTANTS)


def has_attributes(value: Any) -> bool:
    """Whether a number or text has attributes, which do not show in its value: one of a class of the user's may."""
    return isinstance(value, _BY_VALUE) and not isinstance(value, enum.Enum) and bool(getattr(value, "__dict__", None))


def is_same_constant(one: Any, other: Any) -> bool:
    """Whether no program could tell two constants apart.

    >>> is_same_constant(0.0, -0.0), is_same_constant(1, True), is_same_constant(float("nan"), float("nan"))
    (False, False, True)
    """
    return one is other or comparable(one) == comparable(other)


def comparable(value: Any) -> Any:
    """A constant, or a tuple of constants, as what only equals that of the same."""
    if isinstance(value, tuple):
        return type(value), *map(comparable, value)
    return type(value), repr(value) if isinstance(value, float | complex) else value


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a block of memory without gaps or overlaps, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return tensor.numel() > 0


def dense_strides(shape: Sequence[int], dim_order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dimensions lie in this order, slowest first.

    >>> dense_strides((2, 3, 4), (0, 2, 1))
    (12, 1, 3)
    """
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(dim_order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def with_layout(signature: Signature, reader: LayoutReader) -> Signature:
    """The signature for tensors that lie as their buffers do and in no other way."""

    def pin(leaf: Leaf) -> Leaf:
        return replace(leaf, layout_reader=reader, is_plain=False) if isinstance(leaf, TensorLeaf) else leaf

    return _map_leaves(signature, pin)


def with_fixed(signature: Signature, fixed: Sequence[tuple[str, int]]) -> Signature:
    """The signature with some (input, dimension) pairs no longer dynamic, and sizes nobody carries dropped."""

    def settle(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, TensorLeaf):
            return leaf
        dynamic = tuple((d, s) for d, s in leaf.dynamic if (leaf.name, d) not in fixed)
        moving = {d for d, _ in dynamic}
        return replace(leaf, dynamic=dynamic, fixed=tuple((d, n) for d, n in enumerate(leaf.shape) if d not in moving))

    def rename(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, TensorLeaf):
            return leaf
        return replace(leaf, dynamic=tuple((d, kept.index(signature.size_names[s])) for d, s in leaf.dynamic))

    settled = _map_leaves(signature, settle)
    carried = {size for leaf in settled.tensors for _, size in leaf.dynamic}
    kept = [name for size, name in enumerate(signature.size_names) if size in carried]
    return replace(_map_leaves(settled, rename), size_names=tuple(kept))


def _map_leaves(signature: Signature, change: Callable[[Leaf], Leaf]) -> Signature:
    arguments: list[Leaf | tuple[Structure, tuple[Leaf, ...]]] = []
    for argument in signature.arguments:
        if isinstance(argument, tuple):
            arguments.append((argument[0], tuple(change(leaf) for leaf in argument[1])))
        else:
            arguments.append(change(argument))
    return replace(signature, arguments=tuple(arguments))
