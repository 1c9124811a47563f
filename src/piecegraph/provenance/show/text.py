"""A table of kernels, what changed between two, and groups, for a terminal."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from piecegraph.base.text import printable
from piecegraph.provenance.groups.group import Group, Groups
from piecegraph.provenance.show.columns import GAP, Column, diff_columns, fit, table_columns
from piecegraph.provenance.show.group_wording import groups_footer, headline, no_groups, repeats, role, sentences, share
from piecegraph.provenance.show.wording import diff_footer, table_footer
from piecegraph.provenance.tables.changes import Diff
from piecegraph.provenance.tables.table import Table

WIDTH = 140


def table_text(table: Table, *, width: int = WIDTH, limit: int | None = None) -> str:
    """The table as plain text, without a line end at its end.

    Args:
        table: what to show.
        width: how many characters a line may have.
        limit: how many rows to show; all if None.
    """
    return plain_text(table_view(table, width=width, limit=limit), width)


def diff_text(diff: Diff, *, width: int = WIDTH, limit: int | None = None) -> str:
    """The changes as plain text; arguments as for :func:`table_text`."""
    return plain_text(diff_view(diff, width=width, limit=limit), width)


def groups_text(groups: Groups) -> str:
    """The groups as plain text."""
    return plain_text(groups_view(groups), WIDTH)


def table_view(table: Table, *, width: int = WIDTH, limit: int | None = None) -> RenderableType:
    """The table for a rich console; arguments as for :func:`table_text`."""
    return _view(table_columns(table.rows[:limit]), table_footer(table, limit), width)


def diff_view(diff: Diff, *, width: int = WIDTH, limit: int | None = None) -> RenderableType:
    """The changes for a rich console; arguments as for :func:`table_text`."""
    return _view(diff_columns(diff.changes[:limit]), diff_footer(diff, limit), width)


def groups_view(groups: Groups) -> RenderableType:
    """A small table and a paragraph for each group. A rich console drops the colours where there is no terminal."""
    if not groups.groups:
        return Text(no_groups(groups))
    blocks: list[RenderableType] = []
    for group in groups.groups:
        title = Text(group.label, "bold cyan").append(f"  {headline(group)}", "bold")
        paragraph = Padding(Text(" ".join(sentences(group, ""))), (0, 0, 1, 4))
        blocks += [title, _member_table(group), paragraph]
    return Stack(*blocks, Text(groups_footer(groups), "dim"))


def _view(columns: list[Column], footer: list[str], width: int) -> RenderableType:
    if not columns[0].cells:
        return Stack(*(Text(printable(line)) for line in footer))
    drawn = RichTable(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    fitted = fit(columns, width)
    for column in fitted:
        drawn.add_column(column.head, justify="right" if column.is_number else "left", no_wrap=True, width=column.width)
    for cells in zip(*(column.cells for column in fitted), strict=True):
        # Text, not markup: names of kernels hold square brackets.
        drawn.add_row(*(Text(printable(cell)) for cell in cells))
    return Stack(drawn, Text(), *(Text(printable(line), style="dim") for line in footer))


def _member_table(group: Group) -> RichTable:
    drawn = RichTable(box=None, padding=(0, 2, 0, 0), show_header=False)
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold", ratio=1)
    drawn.add_column(justify="right", no_wrap=True)
    drawn.add_column(no_wrap=True)
    for member in group.members:
        name = Text(member.name, "bold" if member.name == group.anchor else "")
        if member.repeats != (1, 1):
            name.append(f" x {repeats(member)}", "dim")
        drawn.add_row("  ", name, share(member), Text(role(group, member), "dim"))
    return drawn


def plain_text(view: RenderableType, width: int) -> str:
    """What a console without colours prints."""
    file = io.StringIO()
    Console(file=file, width=width + GAP, color_system=None, highlight=False).print(view, soft_wrap=False)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").split("\n"))
