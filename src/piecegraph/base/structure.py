"""Nested arguments and results, taken apart into leaves and put together again.

Tuples, named tuples, lists, dictionaries, dataclasses, transformers' ``ModelOutput`` and whatever is registered with
torch's pytree are containers; objects of plain Python classes are if the caller says so; everything else is a leaf.
Attributes that a container has beside its items are parts of it, too. The invariant: ``build(flatten(x)) == x``, of the
same types.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.base import torch_compat

_Parts = tuple[Any, list[Any], list[str]]
"""(context, children, a path suffix for each child) of one container."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The shape of a nested value: container types and keys, without the leaves."""

    cls: type | None
    """None for a leaf."""
    context: Any = None
    children: tuple[Structure, ...] = ()

    @property
    def is_leaf(self) -> bool:
        return self.cls is None

    @property
    def has_objects(self) -> bool:
        """Whether objects of plain classes are in it, which are containers only if :func:`flatten` is told so."""
        is_object = self.cls is not None and _builder(self.cls) is _build_object
        return is_object or any(child.has_objects for child in self.children)

    def build(self, leaves: Iterator[Any]) -> Any:
        """Fill the structure with leaves, in the order :func:`flatten` gave them."""
        if self.cls is None:
            return next(leaves)
        values = [child.build(leaves) for child in self.children]
        if not isinstance(self.context, _WithAttributes):
            return _builder(self.cls)(self.cls, self.context, values)
        num_items = len(values) - len(self.context.names)
        made = _builder(self.cls)(self.cls, self.context.of_items, values[:num_items])
        vars(made).update(zip(self.context.names, values[num_items:], strict=True))
        return made


@dataclass(frozen=True, slots=True)
class _WithAttributes:
    """The context of a container that has attributes beside its items, which come behind these."""

    of_items: Any
    names: tuple[str, ...]


LEAF = Structure(None)


def flatten(
    value: Any, path: str = "", is_container: Callable[[Any], bool] | None = None
) -> tuple[list[Any], list[str], Structure]:
    """Take a value apart: its leaves, a readable path for each, and the structure that puts them together.

    Args:
        value: what is taken apart.
        path: what its paths begin with.
        is_container: asked of everything but tensors that is no other container: whether to take it apart by its
            attributes, if it is of a plain Python class (:func:`attributes`). Without it, none is.

    >>> leaves, paths, structure = flatten({"x": (1, 2), "y": [3]}, "batch")
    >>> leaves, paths
    ([1, 2, 3], ['batch.x[0]', 'batch.x[1]', 'batch.y[0]'])
    >>> structure.build(iter(leaves))
    {'x': (1, 2), 'y': [3]}
    """
    parts = _split(value) or _split_object(value, is_container)
    if parts is None:
        return [value], [path], LEAF
    context, children, suffixes = parts
    leaves: list[Any] = []
    paths: list[str] = []
    structures: list[Structure] = []
    for child, suffix in zip(children, suffixes, strict=True):
        child_path = path + suffix if path else suffix.removeprefix(".")
        child_leaves, child_paths, child_structure = flatten(child, child_path, is_container)
        leaves += child_leaves
        paths += child_paths
        structures.append(child_structure)
    return leaves, paths, Structure(type(value), context, tuple(structures))


def each_once() -> Callable[[Any], bool]:
    """For :func:`flatten`: every object of a plain class is taken apart where it is met first."""
    met: dict[int, Any] = {}

    def is_new(value: Any) -> bool:
        num_met = len(met)
        met[id(value)] = value
        return len(met) > num_met

    return is_new


def children(value: Any) -> dict[str, Any]:
    """What a container is taken apart into, by the names that paths have of it; empty for a leaf."""
    parts = _split(value)
    return {} if parts is None else dict(zip(parts[2], parts[1], strict=True))


def map_arguments(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change every atom of nested op arguments: plain tuples, lists, dicts and slices, which is all that ops take."""
    if type(value) is tuple:
        return tuple([map_arguments(part, change) for part in value])
    if type(value) is list:
        return [map_arguments(part, change) for part in value]
    if type(value) is dict:
        return {key: map_arguments(part, change) for key, part in value.items()}
    if type(value) is slice:
        return slice(*(map_arguments(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def atoms(value: Any) -> list[Any]:
    """The atoms of nested op arguments."""
    found: list[Any] = []
    map_arguments(value, found.append)
    return found


TABLES = (collections.OrderedDict, dict)


def builtin_kind(value: Any, kinds: tuple[Any, ...]) -> Any:
    """The class of Python's own that a container is of, to be looked at and filled by its methods: those of a subclass
    may make what they give, change what they are given, or keep books.
    """
    return next(kind for kind in kinds if isinstance(value, kind))


def _split(value: Any) -> _Parts | None:
    parts = _split_items(value)
    if parts is None or type(value) in _PLAIN or not (beside := _attributes_beside(value)):
        return parts
    context, children, suffixes = parts
    names = [f".{name}" for name in beside]
    return _WithAttributes(context, tuple(beside)), [*children, *beside.values()], [*suffixes, *names]


_PLAIN = (tuple, list, dict)


def _attributes_beside(value: Any) -> dict[str, Any]:
    """The attributes of a container that are none of its items."""
    own = getattr(value, "__dict__", None)
    if not own or own is value:
        return {}
    if dataclasses.is_dataclass(value):  # transformers' ModelOutput is one, and a dictionary
        items: Any = {field.name for field in dataclasses.fields(value)}
    elif isinstance(value, (*_PLAIN,)):
        items = value if isinstance(value, dict) else ()
    else:
        return {}  # registered with torch's pytree, whose business it is
    return {name: held for name, held in own.items() if name not in items}


def _split_items(value: Any) -> _Parts | None:
    if isinstance(value, dict):
        kind = dict if type(value) is dict else builtin_kind(value, TABLES)
        keys = tuple(kind.keys(value))
        # A dict subclass may carry more than its items (a default factory): its empty copy is kept to be refilled.
        made_by = getattr(value, "default_factory", None)
        context: Any = keys if type(value) is dict else (keys, _empty_copy(value), made_by)
        return context, list(kind.values(value)), [f".{key}" for key in keys]
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        items = list(value if type(value) in _PLAIN else builtin_kind(value, _PLAIN).__iter__(value))
        suffixes = [f".{n}" for n in names] if names else [f"[{i}]" for i in range(len(items))]
        return None, items, suffixes
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in dataclasses.fields(value))
        return names, [object.__getattribute__(value, name) for name in names], [f".{name}" for name in names]
    node = torch_compat.pytree_node(type(value))
    if node is None:
        return None
    children, context = node[0](value)
    return context, list(children), [f"[{i}]" for i in range(len(children))]


def _split_object(value: Any, is_container: Callable[[Any], bool] | None) -> _Parts | None:
    if is_container is None or isinstance(value, torch.Tensor) or not is_container(value):
        return None
    state = attributes(value)
    if state is None:
        return None
    return tuple(state), list(state.values()), [f".{name}" for name in state]


def attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of an object that consists of nothing else; None for any other.

    Such is what Python itself copies by making an empty object and filling in its ``__dict__``: a class without slots,
    without memory in C and without a way of its own to be copied or pickled.
    """
    cls = type(value)
    if any(getattr(cls, name, None) is not getattr(object, name, None) for name in _COPYING):
        return None
    try:
        reduced: Any = object.__reduce_ex__(value, 2)
    except TypeError:  # memory in C that Python knows no copy of
        return None
    _, _, state, *items = reduced
    is_plain = (state is None or type(state) is dict) and not any(items)
    return dict(state or {}) if is_plain and hasattr(value, "__dict__") else None


_COPYING = (
    "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__",
    "__copy__", "__deepcopy__",
)  # fmt: skip


def _empty_copy(value: dict[Any, Any]) -> Any:
    if dataclasses.is_dataclass(value):
        return None
    empty = copy.copy(value)
    empty.clear()
    return empty


def _builder(cls: type) -> Callable[[type, Any, list[Any]], Any]:
    if issubclass(cls, dict):
        return _build_plain_dict if cls is dict else _build_dict
    if issubclass(cls, (tuple, list)):
        return _build_sequence
    if dataclasses.is_dataclass(cls):
        return _build_dataclass
    return _build_object if torch_compat.pytree_node(cls) is None else _build_registered


def _build_plain_dict(cls: type, keys: Any, values: list[Any]) -> Any:
    return dict(zip(keys, values, strict=True))


def _build_dict(cls: type, context: Any, values: list[Any]) -> Any:
    keys, empty, _ = context
    items = dict(zip(keys, values, strict=True))
    if empty is None:  # transformers' ModelOutput: a dataclass that is a dict of its fields that are not None
        return cls(**items)
    filled = copy.copy(empty)
    kind = builtin_kind(filled, TABLES)
    for key, value in items.items():
        kind.__setitem__(filled, key, value)
    return filled


def _build_sequence(cls: Any, _: Any, values: list[Any]) -> Any:
    if cls in _PLAIN:
        return cls(values)
    if issubclass(cls, list):
        made: list[Any] = cls.__new__(cls)
        list.extend(made, values)
        return made
    try:
        return tuple.__new__(cls, values)
    except TypeError:  # it is written in C: torch.Size, torch.return_types
        return cls(values)


def _build_dataclass(cls: type, names: Any, values: list[Any]) -> Any:
    # Not through __init__: fields may be frozen, init=False or derived in __post_init__.
    made: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _build_object(cls: type, names: Any, values: list[Any]) -> Any:
    made: Any = object.__new__(cls)
    vars(made).update(zip(names, values, strict=True))
    return made


def _build_registered(cls: type, context: Any, values: list[Any]) -> Any:
    node = torch_compat.pytree_node(cls)
    assert node is not None, cls
    return node[1](values, context)
