"""One row of the table, looked into: the places that launch its kernel, how they are reached, and single launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from piecegraph.base.origin import Origin
from piecegraph.base.text import duration
from piecegraph.errors import SelectionError
from piecegraph.provenance.launch import Launch
from piecegraph.provenance.tables.rows import Row, Site
from piecegraph.provenance.tables.table import Table

_MOST_SITES = 12
_MOST_INSTANCES = 5


def find_row(table: Table, number: int) -> Row:
    """A row by its place in the table, from 1."""
    if not 1 <= number <= len(table.rows):
        raise SelectionError(
            "PG712", f"there is no row {number}", why=f"the table has {len(table.rows)}", hint="count from 1"
        )
    return table.rows[number - 1]


def row_text(row: Row) -> str:
    """Everything that is known of a row, for a reader."""
    return "\n".join(_lines(row))


def _lines(row: Row) -> Iterator[str]:
    times = row.times
    yield f"{row.kernel}, called by {row.shown_call or 'nobody known'}"
    yield (
        f"{row.num_instances:,} launches, {duration(row.total)} ({row.share:.1f} %): median {duration(times.median)}, "
        f"{duration(times.shortest)} to {duration(times.longest)}"
    )
    names = dict.fromkeys(launch.name for launch in row.instances if launch.name not in ("", row.kernel))
    yield from (f"  {name}" for name in names)
    yield "\nsites"
    for site in row.sites[:_MOST_SITES]:
        yield f"  {_place(site)}: {len(site.instances):,} launches, {duration(site.total)}"
        yield from (f"    also {_origin(origin)}" for origin in site.origins[1:])
    yield from _more(row.sites, _MOST_SITES)
    first = row.sites[0]
    if first.stack:
        yield f"\nstack of {_place(first)}"
        yield from (f"  {line.file}:{line.line}  {line.text}".rstrip() for line in first.stack)
    yield f"\nlaunches of {_place(first)}"
    yield from (f"  {_launch(launch, first.instances[0])}" for launch in first.instances[:_MOST_INSTANCES])
    yield from _more(first.instances, _MOST_INSTANCES)


def _place(site: Site) -> str:
    return _origin(site.origins[0]) if site.origins else site.op or "an unknown place"


def _origin(origin: Origin) -> str:
    where = [origin.op]
    if origin.module:
        where.append(f"in {origin.module}")
    if origin.line is not None:
        where.append(f"at {origin.line}")
    return " ".join(where)


def _launch(launch: Launch, first: Launch) -> str:
    parts = [f"+{duration(launch.start - first.start)}", f"took {duration(launch.duration)}", f"stream {launch.stream}"]
    if launch.grid is not None:
        parts.append(f"grid {launch.grid}")
    if launch.block is not None:
        parts.append(f"block {launch.block}")
    if launch.call is not None and launch.call.shapes:
        parts.append(", ".join(launch.call.shapes))
    return "; ".join(parts)


def _more(things: Sequence[object], shown: int) -> list[str]:
    return [f"  and {len(things) - shown:,} more"] if len(things) > shown else []
