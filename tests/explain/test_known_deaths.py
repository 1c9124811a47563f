# ruff: noqa: E501 - messages stand here as they are printed
"""Processes that really die, and schedulers that say so: the page names what ended them, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.explain.catalogue import load_catalogue
from piecegraph.explain.from_logs import explain_text
from piecegraph.explain.page import Page

CATALOGUE = load_catalogue()


def log_of(command: list[str], **options: object) -> str:
    """All that a command prints, as in a log."""
    pipe = subprocess.PIPE
    done = subprocess.run(command, stdout=pipe, stderr=subprocess.STDOUT, check=False, timeout=60, **options)  # type: ignore[call-overload]
    return str(done.stdout.decode())


def shell(script: str, shell: str = "bash") -> str:
    return log_of([shell, "-c", script])


def page_of(log: str) -> Page:
    return explain_text(log, CATALOGUE)


def named(log: str) -> list[str]:
    """The entries that are given as the reason."""
    return [known.id for known in page_of(log).known if known.is_of_root]


def dying(signal: str) -> str:
    code = f"import os, signal; os.kill(os.getpid(), signal.{signal})"
    return log_of([sys.executable, "-X", "faulthandler", "-c", code])


KILLED = "echo step 1; sh -c 'kill -9 $$'; echo"
DEATHS = {
    "killed, told by bash": (lambda: shell(KILLED), "process-killed"),
    "killed, told by sh": (lambda: shell(KILLED, "sh"), "process-killed"),
    "a bus error": (lambda: dying("SIGBUS"), "bus-error"),
    "a segmentation fault": (lambda: dying("SIGSEGV"), "segmentation-fault"),
    "an illegal instruction": (lambda: dying("SIGILL"), "illegal-instruction"),
}


@pytest.mark.parametrize("name", DEATHS)
def test_a_process_that_dies(name: str) -> None:
    make, expected = DEATHS[name]
    log = make()
    assert named(log)[:1] == [expected], log


SAYINGS = {
    "scheduler-time-limit": "slurmstepd: error: *** STEP 83.13 ON n10 CANCELLED AT 2026-05-02T03:58:46 DUE TO TIME LIMIT ***",
    "scheduler-preempted": "slurmstepd: error: *** JOB 83 ON n10 CANCELLED AT 2026-05-02T03:58:46 DUE TO PREEMPTION ***",
    "scheduler-node-failed": "srun: error: Node failure on n11",
    "scheduler-cancelled": "slurmstepd: error: *** JOB 83 ON n10 CANCELLED AT 2026-05-02T03:58:46 ***",
    "host-oom-killed": "slurmstepd: error: Detected 1 oom_kill event in StepId=83.0. Some of the step tasks have been OOM Killed.",
    "process-killed": "srun: error: n10: task 3: Killed",
    "ucx-caught-signal": "[n10:4242:0:4242] Caught signal 11 (Segmentation fault: address not mapped to object at address (nil))",
    "vllm-engine-died": "ERROR 05-02 03:58:46 [core_client.py:605] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.",
}


@pytest.mark.parametrize("name", SAYINGS)
def test_words_of_a_stand_in(name: str) -> None:
    log = shell(f"echo step 1; echo step 2; echo '{SAYINGS[name]}' >&2; exit 1")
    assert named(log)[:1] == [name]


@pytest.mark.parametrize("name", SAYINGS)
def test_the_same_words_beside_an_exception_are_not_its_reason(name: str) -> None:
    """They stand in the log, and the page says so; but what the program itself raised has another reason."""
    code = "raise KeyError('weights of layer 3')"
    log = shell(
        f"{sys.executable} -c \"{code}\"; for i in 1 2 3; do echo shutting down $i; done; echo '{SAYINGS[name]}'"
    )
    assert named(log) == []


def test_words_that_only_look_like_a_death() -> None:
    said = [
        "Time limit of the job is 24:00:00",
        "Killed 3 stale workers, went on",
        "handlers for SIGKILL, SIGTERM: none",
        "Caught signals are counted: 11",
        "segmentation fault detection is off",
        "all 8 engines are up, none died",
    ]
    log = shell("".join(f"echo '{line}';" for line in said))
    assert page_of(log).known == ()


def test_a_worker_that_is_killed_in_a_pool(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(
        "import os, signal, torch.multiprocessing as mp\n"
        "def work(i):\n    os.kill(os.getpid(), signal.SIGKILL if i else signal.SIGCONT)\n"
        "if __name__ == '__main__':\n    mp.start_processes(work, nprocs=2, start_method='fork')\n"
    )
    log = log_of([sys.executable, str(script)])
    assert "terminated with signal SIGKILL" in log
    assert named(log)[:1] == ["process-killed"]


def test_a_launcher_whose_terminal_goes_away(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(30)\n")
    log = log_of([sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)])
    assert "SIGHUP" in log
    assert named(log)[:1] == ["hung-up"], log


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr'); p.parse_args()", ["--lrr=3"]),
        ("import click\n@click.command()\ndef main(): pass\nmain()", ["--lrr=3"]),
    ],
)
def test_a_command_line_that_is_refused(code: str, arguments: list[str]) -> None:
    assert named(log_of([sys.executable, "-c", code, *arguments]))[:1] == ["argument-invalid"]
