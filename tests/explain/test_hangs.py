"""Collectives that took too long: who waited where, and what the log proves of the others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from piecegraph.explain.from_logs import explain_logs
from piecegraph.explain.page import Page
from piecegraph.explain.render import to_text
from piecegraph.explain.wording import headline

SOURCE = "E1120 10:00:07.123456789 ProcessGroupNCCL.cpp"


def watchdog(
    rank: int,
    number: int,
    op: str = "ALLREDUCE",
    size: int = 1024,
    *,
    group: str = "0(default_pg)",
    of: int | None = None,
) -> str:
    """What the watchdog of a rank says today; ``of`` is the rank in the group."""
    within = rank if of is None else of
    work = f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000)"
    caught = f"[Rank {within}] Watchdog caught collective operation timeout: {work} ran for 600050 milliseconds"
    name = f"[PG ID {group.split('(')[0]} PG GUID {group} Rank {within}]"
    last = f"last enqueued NCCL work: {number}, last completed NCCL work: {number - 1}."
    thread = f"{name} Process group watchdog thread terminated with exception: {caught} before timing out."
    return "\n".join(
        [
            f"[rank{rank}]:[{SOURCE}:616] {caught} before timing out.",
            f"[rank{rank}]:[{SOURCE}:1834] {name} Timeout at NCCL work: {number}, {last}",
            f"[rank{rank}]:[{SOURCE}:1595] {thread}",
            "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f0d in libc10.so)",
            "terminate called after throwing an instance of 'c10::DistBackendError'",
            f"  what():  {thread}",
        ]
    )


def dump_signal(rank: int, last: int) -> str:
    """What a rank says that another one told of its timeout."""
    return (
        f"[rank{rank}]:[{SOURCE}:683] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal due to a "
        f"collective timeout from rank 0 and we will try our best to dump the debug info. "
        f"Last enqueued NCCL work: {last}, last completed NCCL work: {last}."
    )


def page_of(lines: Iterable[str], folder: Path) -> Page:
    path = folder / "run.log"
    path.write_text("\n".join(["world_size: 4", "step 1 loss 2.3", *lines]) + "\n")
    return explain_logs([path])


def waited(page: Page) -> list[tuple[str, int | None, tuple[int, ...]]]:
    assert page.hang is not None
    return [(one.collective.op, one.collective.number, one.ranks) for one in page.hang.waiting]


THREE = [watchdog(rank, 42) for rank in range(3)]


def test_a_rank_of_which_nothing_is_known(tmp_path: Path) -> None:
    page = page_of(THREE, tmp_path)
    assert waited(page) == [("ALLREDUCE", 42, (0, 1, 2))]
    assert page.hang is not None
    assert (page.hang.silent, page.hang.world_size, page.hang.is_complete) == ((3,), 4, False)
    assert headline(page).endswith("waited in ALLREDUCE #42 of 1,024 elements; nothing says where rank3 was")
    text = to_text(page)
    assert "rank3 (of 4 ranks): no line says where they were" in text
    assert "line before" not in text, "the rows say what those lines do"


def test_a_rank_that_never_joined(tmp_path: Path) -> None:
    page = page_of([*THREE, dump_signal(3, 41)], tmp_path)
    assert page.hang is not None
    assert (page.hang.not_entered, page.hang.silent) == (((3, 41),), ())
    assert headline(page).endswith("rank3 never joined it")
    assert "never joined  rank3: the last that it had entered was #41" in to_text(page)


@pytest.mark.parametrize(
    ("fourth", "words"),
    [
        (watchdog(3, 41), "rank3 in ALLREDUCE #41 of 1,024 elements, before it"),
        (watchdog(3, 42, "BROADCAST"), "rank3 in BROADCAST #42 of 1,024 elements: they do not match"),
        (watchdog(3, 42, size=512), "rank3 in ALLREDUCE #42 of 512 elements: they do not match"),
        (watchdog(3, 42), "all ranks were in it"),
    ],
)
def test_all_ranks_waited(fourth: str, words: str, tmp_path: Path) -> None:
    page = page_of([*THREE, fourth], tmp_path)
    assert headline(page).startswith("collective timeout: rank0 to rank")
    assert headline(page).endswith(words)
    assert page.hang is not None
    assert page.hang.silent == ()
    assert page.hang.is_complete == ("all ranks" in words)
    assert page.hang.is_mismatch == ("match" in words)


def test_sizes_that_may_differ_are_no_mismatch(tmp_path: Path) -> None:
    lines = [watchdog(rank, 42, "ALLTOALL_BASE", 100 + rank) for rank in range(4)]
    page = page_of(lines, tmp_path)
    assert page.hang is not None
    assert not page.hang.is_mismatch


def test_operations_between_two_ranks_are_not_counted_with_the_others(tmp_path: Path) -> None:
    page = page_of([*THREE, watchdog(3, 7, "SEND")], tmp_path)
    assert page.hang is not None
    assert (page.hang.behind, page.hang.is_mismatch) == ((), False)


def test_an_exception_of_another_rank_is_the_cause(tmp_path: Path) -> None:
    traceback = ("Traceback (most recent call last):", '  File "/w/train.py", line 5, in main', "    x = data[7]")
    failed = [f"[rank3]: {line}" for line in (*traceback, "IndexError: list index out of range")]
    page = page_of([*failed, *THREE], tmp_path)
    assert page.root is not None
    assert page.root.type == "IndexError"
    assert "rank3: failed otherwise" in to_text(page)


def test_a_group_within_the_job_says_nothing_of_other_ranks(tmp_path: Path) -> None:
    lines = [watchdog(2 + rank, 9, "_ALLGATHER_BASE", group="5(tp)", of=rank) for rank in range(2)]
    page = page_of(lines, tmp_path)
    assert waited(page) == [("_ALLGATHER_BASE", 9, (2, 3))]
    assert page.hang is not None
    assert (page.hang.group, page.hang.silent, page.hang.world_size) == ("5 (tp)", (), None)
    assert "of process group 5 (tp) for 600 s" in to_text(page)


def test_the_words_of_torch_1_and_2_0(tmp_path: Path) -> None:
    work = "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802710 milliseconds before timing out."
    lines = [
        f"[E ProcessGroupNCCL.cpp:821] [Rank {rank}] Watchdog caught collective operation timeout: {work}"
        for rank in range(2)
    ]
    page = page_of(lines, tmp_path)
    assert page.outcome == "failure"
    assert waited(page) == [("ALLREDUCE", None, (0, 1))]
    assert "ALLREDUCE for 1803 s" in to_text(page)


def test_reports_of_two_ranks_in_one_line(tmp_path: Path) -> None:
    first, second = (watchdog(rank, 42).splitlines()[0] for rank in range(2))
    assert waited(page_of([first + second], tmp_path)) == [("ALLREDUCE", 42, (0, 1))]


def test_many_ranks_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("\n".join(watchdog(rank, 42 + rank % 9).splitlines()[0] for rank in range(5000)))
    page = explain_logs([path])
    assert page.hang is not None
    assert sum(len(one.ranks) for one in page.hang.waiting) == 4096
    assert "and in 3 more collectives" in to_text(page)
