"""torchelastic's table of failures, with the tracebacks that recorded ranks leave nowhere else."""

from __future__ import annotations

from tests.explain.log.test_lines import TRACEBACK, scan
from tests.explain.test_page import page_of

ROW = """\
  time      : 2026-05-04_10:00:10
  host      : node7
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 82{rank})  (as newer ones say: SIGTERM)
  error_file: /tmp/torchelastic_a/none_b/attempt_0/{rank}/error.json
  traceback : {told}"""
SIGNALLED = ROW.format(rank=3, code=-15, told="Signal 15 (SIGTERM) received by PID 823")


def table(first: str, *others: str) -> str:
    rows = "\n".join(f"[{number}]:\n{row}" for number, row in enumerate(others, 1))
    raised = TRACEBACK.rpartition("\n")[0]
    return (
        f"{raised}\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{'=' * 60}\ntrain.py FAILED\n"
        f"{'-' * 60}\nFailures:\n{rows or '  <NO_OTHER_FAILURES>'}\n{'-' * 60}\nRoot Cause (first observed failure):\n"
        f"[0]:\n{first}\n{'=' * 60}\n"
    )


def indented(traceback: str) -> str:
    return traceback.replace("\n", "\n  ")


def test_a_traceback_that_stands_in_the_table_alone_is_the_root_cause() -> None:
    page = page_of(table(ROW.format(rank=0, code=1, told=indented(TRACEBACK)), SIGNALLED))
    assert page.root is not None
    assert (page.root.type, page.root.message) == ("ValueError", "loss is nan")
    assert page.root.frame is not None
    assert page.root.frame.source == 'raise ValueError("loss is nan")'
    assert [(group.role, [who.label for who in group.processes]) for group in page.who.groups] == [
        ("root", ["rank0"]),
        ("echo", []),
    ]


def test_the_first_observed_failure_comes_first_and_its_own_print_is_the_same() -> None:
    lost = indented(TRACEBACK.replace("ValueError", "KeyError").replace("line 30", "line 31"))
    told = table(ROW.format(rank=2, code=1, told=indented(TRACEBACK)), ROW.format(rank=0, code=1, told=lost))
    page = page_of("\n".join(f"[rank2]: {line}" for line in TRACEBACK.splitlines()) + "\n" + told)
    assert [(group.type, group.role, group.count) for group in page.who.groups][:2] == [
        ("ValueError", "root", 2),
        ("KeyError", "other", 1),
    ]


def test_a_row_that_holds_an_exception_without_a_stack_or_none() -> None:
    page = page_of(table(ROW.format(rank=0, code=1, told="RuntimeError: no labels")))
    assert page.root is not None
    assert page.root.message == "no labels"
    hint = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    assert len(scan(table(ROW.format(rank=0, code=1, told=hint))).failures) == 1


def test_a_table_of_many_ranks_is_read_to_its_end() -> None:
    row = ROW.format(rank=5, code=1, told=indented(TRACEBACK.replace("ValueError: loss", "OSError: disk")))
    page = page_of(table(ROW.format(rank=0, code=1, told=indented(TRACEBACK)), *[row] * 40))
    assert page.root is not None
    assert page.root.type == "ValueError"
