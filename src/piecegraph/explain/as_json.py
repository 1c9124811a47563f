"""A page for programs: a dictionary for JSON, and the schema of it, which is read off the types."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from piecegraph.explain.page import Page
from piecegraph.explain.statements import Certainties, Statement, certainties_of, statements_of
from piecegraph.explain.wording import headline

SCHEMA = 2
"""Raised when a field is renamed, removed or means something else; a further field does not raise it."""


def to_dict(page: Page) -> dict[str, Any]:
    """The page's facts, and its statements with how sure they are."""
    return {
        "schema": SCHEMA,
        "headline": headline(page),
        "statements": [dataclasses.asdict(statement) for statement in statements_of(page)],
        "certainty": dataclasses.asdict(certainties_of(page)),
        **dataclasses.asdict(page),
    }


def page_schema() -> dict[str, Any]:
    """The JSON schema of :func:`to_dict`.

    >>> page_schema()["properties"]["schema"]
    {'const': 2}
    """
    definitions: dict[str, Any] = {}
    page = _object(Page, definitions)
    own = {
        "schema": {"const": SCHEMA},
        "headline": {"type": "string"},
        "statements": _schema_of(tuple[Statement, ...], definitions),
        "certainty": _schema_of(Certainties, definitions),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a page of piecegraph explain",
        "type": "object",
        "properties": {**own, **page["properties"]},
        "required": [*own, *page["required"]],
        "$defs": definitions,
    }


def _object(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    fields = {field.name: _schema_of(hints[field.name], definitions) for field in dataclasses.fields(kind)}
    return {"type": "object", "properties": fields, "required": list(fields)}


def _schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # a type may hold itself
            definitions[kind.__name__] |= _object(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if typing.get_origin(kind) is typing.Literal:
        return {"enum": list(arguments)}
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return {"anyOf": [_schema_of(part, definitions) for part in arguments]}
    if typing.get_origin(kind) is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _schema_of(arguments[0], definitions)}
    if typing.get_origin(kind) is tuple:
        parts = [_schema_of(part, definitions) for part in arguments]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    return {"type": {str: "string", int: "integer", bool: "boolean", types.NoneType: "null"}[kind]}
