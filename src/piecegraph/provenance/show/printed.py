"""What a user is given: a table, a diff and groups that print themselves as text."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from piecegraph.provenance.groups.group import Groups
from piecegraph.provenance.show.text import diff_text, groups_text, table_text
from piecegraph.provenance.tables.changes import Diff
from piecegraph.provenance.tables.table import Table

Printed = TypeVar("Printed", "PrintedTable", "PrintedDiff", "PrintedGroups")


class PrintedTable(Table):
    """A table of kernels; so are its parts, and the table in another order."""

    __slots__ = ()

    def __str__(self) -> str:
        return table_text(self)


class PrintedDiff(Diff):
    """What changed between two tables."""

    __slots__ = ()

    def __str__(self) -> str:
        return diff_text(self)


class PrintedGroups(Groups):
    """The groups of a profile."""

    __slots__ = ()

    def __str__(self) -> str:
        return groups_text(self)


def printed(kind: type[Printed], value: Any) -> Printed:
    """The same value, of the kind that prints itself."""
    return kind(**{field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
