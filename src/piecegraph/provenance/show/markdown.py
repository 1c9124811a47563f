"""A table of kernels, and groups, for an issue or a chat."""

from __future__ import annotations

from collections.abc import Mapping

from piecegraph.base.text import printable
from piecegraph.provenance.groups.group import Group, GroupMember, Groups
from piecegraph.provenance.show.columns import table_columns
from piecegraph.provenance.show.group_wording import groups_footer, headline, no_groups, repeats, role, sentences, share
from piecegraph.provenance.show.wording import table_footer
from piecegraph.provenance.tables.table import Table

_NAMED = ("piecegraph", "python", "torch", "triton", "cuda (torch build)", "cuda driver")


def table_markdown(table: Table, environment: Mapping[str, str], *, limit: int | None = None) -> str:
    """The table, its footer, and what it ran on.

    Args:
        table: what to show.
        environment: what :func:`piecegraph.base.environment.describe_environment` says.
        limit: how many rows to show; all if None.
    """
    shown = [column for column in table_columns(table.rows[:limit]) if any(column.cells)]
    lines = []
    if shown:
        lines.append(_line([column.title for column in shown]))
        lines.append(_line(["---:" if column.is_number else "---" for column in shown]))
        for cells in zip(*(column.cells for column in shown), strict=True):
            lines.append(
                _line([cell if column.is_number else _code(cell) for column, cell in zip(shown, cells, strict=True)])
            )
        lines.append("")
    lines += [f"- {_escaped(line)}" for line in table_footer(table, limit)]
    versions = [f"{name} {environment[name]}" for name in _NAMED if name in environment]
    return "\n".join([*lines, f"- {_escaped(', '.join(filter(None, [table.device, *versions])))}"]) + "\n"


def groups_markdown(groups: Groups) -> str:
    """A heading, the claim in words, and a small table for each group."""
    lines = ["# Kernel groups", ""]
    if not groups.groups:
        return "\n".join([*lines, no_groups(groups), ""])
    for group in groups.groups:
        lines += [f"## {group.label}: {headline(group)}", "", " ".join(sentences(group, "`")), ""]
        lines += ["| member | per call | calls | in the group |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(_member_cells(group, member))} |" for member in group.members]
        lines.append("")
    return "\n".join([*lines, groups_footer(groups), ""])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(cell: str) -> str:
    """A cell as code: names hold underscores, stars and brackets. A bar would end the cell even there."""
    return f"`{printable(cell).replace('`', chr(39)).replace('|', chr(92) + '|')}`" if cell else ""


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\`*_[]<>#|" else char for char in printable(text))


def _member_cells(group: Group, member: GroupMember) -> list[str]:
    name = f"`{member.name.replace('|', chr(92) + '|')}`"
    part = role(group, member)
    return [
        f"{name} ({part})" if part else name,
        repeats(member),
        f"{member.calls} of {group.support}",
        f"{share(member)} ({member.launches} of {member.launches_in_all})",
    ]
