"""Several runs in one log, and one run that looks like several."""

from __future__ import annotations

from piecegraph.explain.from_logs import explain_text
from piecegraph.explain.page import Page
from tests.explain.log.test_lines import OTHER, TRACEBACK

FIRST = "training starts with the settings of the file\n"
LOST = TRACEBACK.replace(
    "ValueError: loss is nan",
    "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: remote process exited",
)


def page_of(text: str) -> Page:
    return explain_text(text, ())


def test_a_late_rank_prints_the_first_line_again_and_then_an_echo() -> None:
    page = page_of(f"{FIRST}step 1\n{TRACEBACK}\n{FIRST}{LOST}\nthe end\n")
    assert page.other_runs == ()
    assert [(group.type.rpartition(".")[2], group.role) for group in page.who.groups] == [
        ("ValueError", "root"),
        ("DistBackendError", "echo"),
    ]
    assert page.num_lines == 18
    assert page.last_line == ("the end", 18)


def test_a_first_line_that_another_failure_follows_begins_a_run() -> None:
    page = page_of(f"{FIRST}step 1\n{TRACEBACK}\n{FIRST}{OTHER}\n")
    assert len(page.other_runs) == 1
    assert page.root is not None
    assert page.root.type == "KeyError"
