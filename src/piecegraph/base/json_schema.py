"""Values for programs: the JSON schema of a dataclass, read off its types, and the way back from what JSON holds."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def object_schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a dataclass; those of the dataclasses that it holds are added to ``definitions``."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: schema_of(hints[field.name], definitions) for field in dataclasses.fields(kind)}
    return {"type": "object", "properties": fields, "required": list(fields)}


def schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a type.

    >>> schema_of(dict[str, float], {})
    {'type': 'object', 'additionalProperties': {'type': 'number'}}
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # a type may hold itself
            definitions[kind.__name__] |= object_schema(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [schema_of(part, definitions) for part in arguments]}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(arguments[1], definitions)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": schema_of(arguments[0], definitions)}
    if origin is tuple:
        parts = [schema_of(part, definitions) for part in arguments]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    return {"type": _NAMES[kind]}


def from_plain(kind: type[T], value: Any) -> T:
    """A dataclass again, from what ``dataclasses.asdict`` and JSON made of it. Fields that it has not are left out.

    Raises:
        ValueError: the value does not fit, with the place where.
    """
    found: T = _read(kind, value, "it")
    return found


def _read(kind: Any, value: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _read_object(kind, value, place)
    if origin in (types.UnionType, typing.Union):
        # None or one other type: all that our results hold.
        (other,) = (part for part in arguments if part is not types.NoneType)
        return None if value is None else _read(other, value, place)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(arguments[0], part, f"{place}[{index}]") for index, part in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {name: _read(arguments[1], part, f"{place}.{name}") for name, part in value.items()}
    if origin is typing.Literal and value in arguments:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    raise ValueError(f"{place} is {value!r:.40}")


def _read_object(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {value!r:.40}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in value:
            raise ValueError(f"{place} has no {name!r}")
    return kind(**{name: _read(hints[name], value[name], f"{place}.{name}") for name in names})
