"""A table of kernels, or what changed between two, for an issue or a chat."""

from __future__ import annotations

from collections.abc import Mapping

from piecegraph.provenance.show.columns import Column
from piecegraph.provenance.show.text import diff_columns, table_columns
from piecegraph.provenance.show.wording import diff_footer, printable, table_footer
from piecegraph.provenance.tables.changes import Diff
from piecegraph.provenance.tables.table import Table

_NAMED = ("piecegraph", "python", "torch", "triton", "cuda (torch build)", "cuda driver")


def table_markdown(table: Table, environment: Mapping[str, str], *, limit: int | None = None) -> str:
    """The table, its footer, and what it ran on.

    Args:
        table: what to show.
        environment: what :func:`piecegraph.base.environment.describe_environment` says.
        limit: how many rows to show; all if None.
    """
    return _page(table_columns(table.rows[:limit]), table_footer(table, limit), table.device, environment)


def diff_markdown(diff: Diff, environment: Mapping[str, str], *, limit: int | None = None) -> str:
    """The changes, the totals, and what they ran on; arguments as for :func:`table_markdown`."""
    return _page(diff_columns(diff.changes[:limit]), diff_footer(diff, limit), diff.device, environment)


def _page(columns: list[Column], footer: list[str], device: str, environment: Mapping[str, str]) -> str:
    shown = [column for column in columns if any(column.cells)]
    lines = []
    if shown:
        lines.append(_line([column.title for column in shown]))
        lines.append(_line(["---:" if column.is_number else "---" for column in shown]))
        for cells in zip(*(column.cells for column in shown), strict=True):
            lines.append(
                _line([cell if column.is_number else _code(cell) for column, cell in zip(shown, cells, strict=True)])
            )
        lines.append("")
    lines += [f"- {_escaped(line)}" for line in footer]
    versions = [f"{name} {environment[name]}" for name in _NAMED if name in environment]
    return "\n".join([*lines, f"- {_escaped(', '.join(filter(None, [device, *versions])))}"]) + "\n"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(cell: str) -> str:
    """A cell as code: names hold underscores, stars and brackets. A bar would end the cell even there."""
    return f"`{printable(cell).replace('`', chr(39)).replace('|', chr(92) + '|')}`" if cell else ""


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\`*_[]<>#|" else char for char in printable(text))
