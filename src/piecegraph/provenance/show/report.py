"""A trace on a page to share: its table, every launch for the timeline, its groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piecegraph.base.plan import SourceLine
from piecegraph.base.text import count_of, duration
from piecegraph.provenance.groups.group import Group, Groups
from piecegraph.provenance.launch import KernelProfile
from piecegraph.provenance.profile.interned import Interned
from piecegraph.provenance.show.group_wording import headline, repeats, role, sentences, share
from piecegraph.provenance.show.json_document import groups_document, table_document
from piecegraph.provenance.show.wording import whose_time
from piecegraph.provenance.tables.rows import percent
from piecegraph.provenance.tables.table import Table
from piecegraph.report.content import Figure, GroupCard, Report


def trace_report(
    profile: KernelProfile, table: Table, groups: Groups, environment: Mapping[str, str], title: str
) -> Report:
    """The page of a trace.

    Args:
        profile: what ran.
        table: all of it.
        groups: mined from it.
        environment: what this runs on.
        title: what was traced.
    """
    where = "a CPU: ops take the place of kernels" if table.device == "cpu" else table.device
    launches = count_of(table.coverage.num_launches, "launch", "launches")
    return Report(
        title=title,
        about=f"{launches} on {where}" if where else launches,
        figures=_figures(table),
        notes=table.notes,
        kernels=kernels_document(profile, table),
        groups=tuple(map(_card, groups.groups)),
        machine=environment,
        data={"groups": groups_document(groups)},
    )


def _figures(table: Table) -> tuple[Figure, ...]:
    """How long it took, how much of that the device was idle, and who is to thank for most of it."""
    coverage = table.coverage
    idle = percent(coverage.idle, coverage.span)
    known = percent(coverage.with_line, coverage.total)
    by_time = sorted(table.rows, key=lambda row: -row.total)
    most = f"most of it: {by_time[0].kernel}, {by_time[0].share:.1f} %" if by_time else ""
    return (
        Figure(duration(coverage.total), f"{whose_time(table.device)} of all launches", most),
        Figure(f"{idle:.1f} %", "idle", f"{duration(coverage.idle)} of {duration(coverage.span)}"),
        Figure(
            f"{known:.1f} %",
            "attributed to a line",
            f"{percent(coverage.unattributed, coverage.total):.1f} % to nothing",
        ),
    )


def kernels_document(profile: KernelProfile, table: Table) -> dict[str, Any]:
    """The table as ``--json`` has it, with every line once and meant by its number; and all launches, by column.

    Times are in microseconds, those of ``start_us`` since the first launch. Of a launch, ``row``, ``site`` and
    ``stream`` are places in the rows, in the sites of the row and in ``streams``; ``replay`` is equal for what ran in
    one replay, and -1 outside of any.
    """
    document = table_document(table)
    lines: Interned[tuple[str, int, str]] = Interned()
    for row, shown in zip(table.rows, document["rows"], strict=True):
        shown |= {"shown_call": row.shown_call, "place": str(row.line or "")}
        for site, origins in zip(row.sites, (one["origins"] for one in shown["sites"]), strict=True):
            for origin, entry in zip(site.origins, origins, strict=True):
                entry["stack"] = [lines.number(_line(line)) for line in origin.stack]
    return {**document, "lines": lines.values, **_launches(profile, table)}


def _line(line: SourceLine) -> tuple[str, int, str]:
    return (line.file, line.line, line.text)


def _launches(profile: KernelProfile, table: Table) -> dict[str, Any]:
    places = {
        id(launch): (number, at)
        for number, row in enumerate(table.rows)
        for at, site in enumerate(row.sites)
        for launch in site.instances
    }
    streams: Interned[str] = Interned()
    first = min((launch.start for launch in profile.launches), default=0.0)
    return {
        "launches": {
            "row": [places[id(launch)][0] for launch in profile.launches],
            "site": [places[id(launch)][1] for launch in profile.launches],
            "start_us": [round(launch.start - first, 3) for launch in profile.launches],
            "duration_us": [round(launch.duration, 3) for launch in profile.launches],
            "stream": [streams.number(launch.stream) for launch in profile.launches],
            "replay": [launch.replay for launch in profile.launches],
        },
        "streams": streams.values,
    }


def _card(group: Group) -> GroupCard:
    members = tuple(
        (
            member.name if member.repeats == (1, 1) else f"{member.name} \N{MULTIPLICATION SIGN} {repeats(member)}",
            share(member),
            role(group, member),
        )
        for member in group.members
    )
    return GroupCard(group.label, headline(group), members, " ".join(sentences(group, "")))
