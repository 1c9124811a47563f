"""What a page says of a collective that took too long: its headline, and rows about who waited and who is missing."""

from __future__ import annotations

from collections.abc import Iterable

from piecegraph.explain.evidence import Collective, Process
from piecegraph.explain.hangs import Hang, Waiting
from piecegraph.explain.page import Page
from piecegraph.explain.words import describe_line, describe_processes
from piecegraph.report.statements import PageRow

MAX_WAITING = 6


def is_about_hang(page: Page) -> bool:
    """Whether nothing failed but ranks that waited for others."""
    return page.hang is not None and page.outcome == "failure" and page.who.has_only_echoes


def hang_headline(page: Page) -> str:
    """Who waited where, and the first thing that is known of the others."""
    assert page.hang is not None
    hang, most = page.hang, page.hang.waiting[0]
    others = [one for one in hang.waiting[1:] if one not in hang.behind]
    if hang.not_entered:
        rest = f"; {_ranks(rank for rank, _ in hang.not_entered)} never joined it"
    elif hang.is_mismatch and others:
        rest = f"; {_ranks(others[0].ranks)} in {_collective(others[0].collective)}: they do not match"
    elif hang.behind:
        ahead = [one for one in hang.waiting if one not in hang.behind]
        most = ahead[0] if ahead else most
        rest = f"; {_ranks(hang.behind[0].ranks)} in {_collective(hang.behind[0].collective)}, before it"
    elif hang.silent:
        rest = f"; nothing says where {_ranks(hang.silent)} {'was' if len(hang.silent) == 1 else 'were'}"
    else:
        rest = "; all ranks were in it" if hang.is_complete else ""
    return f"collective timeout: {_ranks(most.ranks)} waited in {_collective(most.collective)}{rest}"


def hang_rows(page: Page) -> list[PageRow]:
    """Everything that is known of it."""
    hang = page.hang
    if hang is None:
        return []
    rows = [_waited_row(one, hang) for one in hang.waiting[:MAX_WAITING]]
    if len(hang.waiting) > MAX_WAITING:
        rows.append(PageRow("", f"and in {len(hang.waiting) - MAX_WAITING} more collectives", "quiet"))
    if hang.is_mismatch:
        rows.append(PageRow("mismatch", "ranks entered different operations or sizes under one number", "bad"))
    for one in hang.behind:
        rows.append(
            PageRow("behind", f"{_ranks(one.ranks)}: other ranks had come further than #{one.collective.number}")
        )
    for rank, last in hang.not_entered:
        last_words = f"the last that it had entered was #{last}" if last >= 0 else "it had entered none yet"
        rows.append(PageRow("never joined", f"{_ranks([rank])}: {last_words}", "bad"))
    if hang.silent:
        rows.append(PageRow("silent", _silent(page, hang)))
    if hang.is_complete:
        rows.append(PageRow("complete", f"all {hang.world_size} ranks of the job were in it: none is missing"))
    return rows


def _waited_row(one: Waiting, hang: Hang) -> PageRow:
    group = f" of process group {hang.group}" if hang.group else ""
    seconds = f" for {one.ms / 1000:.0f} s" if one.ms else ""
    return PageRow(
        "waited", f"{_ranks(one.ranks)}, in {_collective(one.collective)}{group}{seconds}  ({describe_line(one.line)})"
    )


def _silent(page: Page, hang: Hang) -> str:
    """Ranks that reported nothing, and those of them that are known to have failed."""
    failed = {process.rank for group in page.who.groups if group.role != "echo" for process in group.processes} & set(
        hang.silent
    )
    quiet = [rank for rank in hang.silent if rank not in failed]
    parts = [f"{_ranks(rank for rank in failed if rank is not None)}: failed otherwise"] if failed else []
    of = f" (of {hang.world_size} ranks)" if hang.world_size else ""
    parts += [f"{_ranks(quiet)}{of}: no line says where they were"] if quiet else []
    return "; ".join(parts)


def _collective(collective: Collective) -> str:
    number = f" #{collective.number}" if collective.number is not None else ""
    sizes = sorted({size for size in (collective.num_in, collective.num_out) if size is not None})
    of = f" of {' to '.join(f'{size:,}' for size in sizes)} elements" if sizes else ""
    return f"{collective.op}{number}{of}"


def _ranks(ranks: Iterable[int]) -> str:
    return describe_processes(Process(f"rank{rank}") for rank in sorted(ranks))
