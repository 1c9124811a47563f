"""Runs that were asked to end, and runs whose launcher asked the other ranks to when one had failed."""

from __future__ import annotations

from pathlib import Path

from piecegraph.explain.from_logs import explain_logs
from tests.explain.log.test_lines import OTHER, TRACEBACK, prefixed
from tests.explain.test_page import page_of

ASKED = "SIGTERM received, saving a checkpoint"
ENDED_BY_ITSELF = "failed (exitcode: 1) local_rank: 0 (pid: 820) of binary: /opt/venv/bin/python\n"


def pages_of_logs(folder: Path, *texts: str) -> str:
    paths = [folder / f"rank{number}.log" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return explain_logs(paths).outcome


def test_lines_of_two_logs_have_no_order(tmp_path: Path) -> None:
    late = "step 1\n" * 20
    assert pages_of_logs(tmp_path, late + TRACEBACK, f"step 1\n{ASKED}\n") == "failure"
    assert pages_of_logs(tmp_path, f"{ASKED}\n{TRACEBACK}", f"step 1\n{ASKED}\n") == "stopped", "it was asked itself"


def test_a_rank_that_was_asked_says_nothing_of_another() -> None:
    assert page_of(f"[rank1]: {ASKED}\n{prefixed('[rank0]: ')}").outcome == "failure"
    assert page_of(f"[rank0]: {ASKED}\n[rank1]: {ASKED}\n{prefixed('[rank0]: ')}").outcome == "stopped"
    assert page_of(f"{ASKED}\n{prefixed('[rank0]: ')}").outcome == "stopped", "nobody in particular: all of them"
    assert page_of(f"(APIServer pid=7) {ASKED}\n{prefixed('(EngineCore_DP0 pid=9) ')}").outcome == "stopped"


def test_an_interrupt_of_one_rank_does_not_explain_another() -> None:
    interrupt = "\n".join(TRACEBACK.splitlines()[:-1]) + "\nKeyboardInterrupt"
    asked = "\n".join(f"[rank1]: {line}" for line in interrupt.splitlines())
    failed = "\n".join(f"[rank0]: {line}" for line in OTHER.splitlines())
    assert page_of(f"{asked}\n{failed}").outcome == "failure"
    assert page_of(asked).outcome == "stopped"


def test_a_launcher_that_saw_an_exit_code_of_its_own_saw_a_failure() -> None:
    assert page_of(f"{ASKED}\n{TRACEBACK}\n{ENDED_BY_ITSELF}").outcome == "failure"
    assert page_of(f"{ASKED}\n{TRACEBACK}\n{ENDED_BY_ITSELF.replace(': 1)', ': 143)')}").outcome == "stopped"
    srun = "srun: error: node7: task 3: Exited with exit code 1\n"
    assert page_of(f"{srun}{ASKED}\n{TRACEBACK}").outcome == "failure"
    assert page_of(f"{ASKED}\n{TRACEBACK}\n{srun}").outcome == "stopped", "after a request all tasks end with some code"


def test_a_launcher_that_is_asked_to_end_says_so_by_an_exception() -> None:
    name = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 812 got signal: 15"
    raised = TRACEBACK.replace("ValueError: loss is nan", name)
    assert page_of(f"step 1\n{raised}").outcome == "stopped"
    assert page_of(f"{OTHER}\n{raised}").outcome == "failure"
    warned = "W0504 10:00:02.100000 812 torch/agent/server/api.py:741] Received Signals.SIGTERM death signal"
    assert page_of(f"{warned}, shutting down workers\n{OTHER}").outcome == "stopped"
