"""A page for programs: a dictionary for JSON, and the schema of it, which is read off the types."""

from __future__ import annotations

import dataclasses
from typing import Any

from piecegraph.base.json_schema import object_schema, schema_of
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
    page = object_schema(Page, definitions)
    own = {
        "schema": {"const": SCHEMA},
        "headline": {"type": "string"},
        "statements": schema_of(tuple[Statement, ...], definitions),
        "certainty": schema_of(Certainties, definitions),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a page of piecegraph explain",
        "type": "object",
        "properties": {**own, **page["properties"]},
        "required": [*own, *page["required"]],
        "$defs": definitions,
    }
