"""Tracebacks that a program printed and went on after, told by the lines that stood above them standing below again."""

from __future__ import annotations

from tests.explain.log.test_lines import OTHER, TRACEBACK
from tests.explain.test_page import page_of

STEPS = "".join(f"step {number} loss 2.{number}\n" for number in range(5))
CAUGHT = TRACEBACK + "\n"  # begins in main, where somebody caught it
FATAL = OTHER.replace("in main", "in <module>") + "\n"


def roles(text: str) -> list[tuple[str, str]]:
    return [(group.type, group.role) for group in page_of(text).who.groups]


def test_a_traceback_that_was_caught_does_not_hide_the_fatal_one_behind_it() -> None:
    assert roles(STEPS + CAUGHT + STEPS + FATAL) == [("KeyError", "root"), ("ValueError", "survived")]


def test_a_run_that_went_on_to_its_end_has_not_failed() -> None:
    page = page_of(STEPS + CAUGHT + STEPS)
    assert page.outcome == "nothing"
    assert page.who.groups[0].role == "survived"
    rank = "".join(f"[rank1]: {line}\n" for line in (STEPS + CAUGHT + STEPS).splitlines())
    assert page_of(rank).outcome == "nothing"


def test_what_does_not_go_back_to_its_usual_output_has_failed() -> None:
    uncaught = CAUGHT.replace("in main", "in <module>")
    for text in (STEPS + CAUGHT, STEPS + uncaught + STEPS, CAUGHT + STEPS, STEPS + CAUGHT + "bye\nbye\nbye\n"):
        assert page_of(text).outcome == "failure", text


def test_the_last_print_of_a_failure_decides() -> None:
    assert page_of(STEPS + CAUGHT + STEPS + CAUGHT + STEPS).outcome == "nothing"
    assert page_of(STEPS + CAUGHT + STEPS + CAUGHT).outcome == "failure"
    dies = CAUGHT.replace(
        '  File "/srv/app/train.py", line 12',
        '  File "/srv/a.py", line 9, in <module>\n    main()\n  File "/srv/app/train.py", line 12',
    )
    assert page_of(STEPS + CAUGHT + STEPS + dies).outcome == "failure"


def test_the_output_of_other_ranks_is_no_proof() -> None:
    caught = "".join(f"[rank0]: {line}\n" for line in CAUGHT.splitlines())
    others = "".join(f"[rank1]: {line}\n" for line in STEPS.splitlines())
    own = others.replace("rank1", "rank0")
    assert page_of(own + others + caught + others).outcome == "failure"
    assert page_of(own + others + caught + own).outcome == "nothing"


def test_what_a_launcher_saw_end_is_explained_by_a_failure_that_others_went_on_after() -> None:
    code = "srun: error: n7: task 3: Exited with exit code 1\n"
    lost = OTHER.replace("KeyError: loss is nan", "RuntimeError: [gloo] Connection closed by peer") + "\n"
    assert roles(STEPS + CAUGHT + STEPS + lost) == [("ValueError", "root"), ("RuntimeError", "echo")]
    assert roles(STEPS + CAUGHT + STEPS + code) == [("ValueError", "root")]
