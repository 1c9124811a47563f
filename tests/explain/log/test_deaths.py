"""Deaths that no traceback tells: processes that really die, and the words of launchers and schedulers."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from piecegraph.explain.evidence import Death, Process
from piecegraph.explain.log.deaths import WORDS, death_of
from piecegraph.explain.page import Page, compose
from piecegraph.explain.render import to_text
from tests.explain.log.test_lines import TRACEBACK, scan


def page_of(text: str) -> Page:
    return compose(scan(text), ())


def run_shell(script: str, folder: Path) -> str:
    """What a shell script prints, standard error included: the shell tells how its commands ended."""
    path = folder / "job.sh"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run(
        ["bash", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
    )
    return done.stdout


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT])
def test_a_shell_tells_how_its_command_died(number: signal.Signals, tmp_path: Path) -> None:
    text = run_shell(f"echo starting\n{sys.executable} -c 'import os; os.kill(os.getpid(), {int(number)})'\n", tmp_path)
    page = page_of(text)
    assert page.outcome == "failure"
    assert page.root is not None
    assert page.root.type == number.name
    death = page.who.groups[0].death
    assert death is not None
    assert (death.signal, death.teller, death.line) == (int(number), "shell", 2)
    assert f"{number.name}: 1 process was ended by this signal" in to_text(page)
    assert "told by       the shell, line 2" in to_text(page)


def test_torchelastic_tells_of_a_rank_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    page = page_of(done.stdout + done.stderr)
    assert page.root is not None
    assert page.root.type == "SIGKILL"
    (ended,) = [exit for exit in page.who.exits if exit.code == -9]
    assert ended.process.rank == 1, "told in a line and in a table, and counted once"


SCHEDULERS = {
    "Message: The node was low on resource: memory. Threshold quantity: 100Mi, available: 62856Ki.": "EVICTED",
    "Reason: Evicted": "EVICTED",
    "slurmstepd: error: *** JOB 83 ON nid1 CANCELLED AT 2025-05-02T03:58:46 DUE TO TIME LIMIT ***": "TIMEOUT",
    " 0: slurmstepd: error: *** STEP 83.1 ON nid1 CANCELLED AT 2025-05-02T03:58:46 DUE TO TIME LIMIT ***": "TIMEOUT",
    "slurmstepd: error: *** JOB 83 ON nid1 CANCELLED AT 2025-05-02T03:58:46 DUE TO PREEMPTION ***": "PREEMPTED",
    "slurmstepd: error: *** JOB 83 ON nid1 CANCELLED AT 2025-05-02T03:58:46 ***": "CANCELLED",
    "slurmstepd: error: *** STEP 83.0 ON n1 CANCELLED AT 2025-05-02T03:58:46 DUE to SIGNAL Terminated ***": "CANCELLED",
    "slurmstepd: error: *** JOB 83 ON n1 CANCELLED AT 2025-05-02T03:58:46 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR "
    "DETAILS ***": "NODE_FAIL",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=83.0. Some of the step tasks were killed.": "OUT_OF_MEMORY",
    "=>> PBS: job killed: walltime 3600 exceeded limit 3600": "TIMEOUT",
    "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.": "OUT_OF_MEMORY",
}


@pytest.mark.parametrize(("words", "state"), SCHEDULERS.items())
def test_a_scheduler_that_ends_the_job(words: str, state: str, tmp_path: Path) -> None:
    page = page_of(run_shell(f"echo step 1\necho '{words}' >&2\necho 'srun: Job step aborted' >&2\n", tmp_path))
    assert page.root is not None
    assert page.root.type == state
    how = "a process was killed for want of memory" if state == "OUT_OF_MEMORY" else "the scheduler ended the job"
    assert to_text(page).startswith(f"{state}: {how}\n")
    assert words.strip(" 0:") in " ".join(to_text(page).split())


def test_a_step_that_is_cancelled_because_a_task_failed_is_an_echo() -> None:
    said = [
        "slurmstepd: error: *** STEP 83.0 ON n1 CANCELLED AT 2025-05-02T03:58:46 ***",
        "srun: error: n1: task 0: Exited with exit code 1",
        "srun: error: n1: tasks 1-3: Terminated",
    ]
    page = page_of("\n".join([TRACEBACK, *said]))
    assert [(group.type, group.role) for group in page.who.groups] == [
        ("ValueError", "root"), ("CANCELLED", "echo"), ("SIGTERM", "echo"),
    ]  # fmt: skip


TELLERS: dict[str, tuple[str, str, Process]] = {
    "[n1:77:0:77] Caught signal 11 (Segmentation fault: address not mapped to object at address (nil))":
        ("SIGSEGV", "process", Process()),
    "*** SIGSEGV received at time=1700000000 on cpu 3 ***": ("SIGSEGV", "process", Process()),
    "[n1:00077] Signal: Bus error (7)": ("SIGBUS", "process", Process()),
    "double free or corruption (!prev)": ("SIGABRT", "process", Process()),
    "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).":
        ("SIGBUS", "process", Process()),
    "[launch.py:325:sigkill_handler] ['python', 'train.py'] exits with return code = -9":
        ("SIGKILL", "launcher", Process()),
    "failed (exitcode: -7) local_rank: 0 (pid: 123) of binary: python":
        ("SIGBUS", "launcher", Process("local rank 0", pid=123)),
    "traceback : Signal 4 (SIGILL) received by PID 123": ("SIGILL", "launcher", Process("pid 123", pid=123)),
    "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)": ("SIGKILL", "launcher", Process()),
    "command terminated with exit code 139": ("SIGSEGV", "launcher", Process()),
    "mpirun noticed that process rank 3 with PID 123 on node n1 exited on signal 9 (Killed).":
        ("SIGKILL", "launcher", Process("rank3", 3, 123, "n1")),
    "Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.":
        ("process died", "launcher", Process("EngineCore_DP0")),
    "Worker proc VllmWorker-3 died unexpectedly, shutting down executor.":
        ("process died", "launcher", Process("VllmWorker-3")),
    "worker 3 died with signal 4": ("SIGILL", "launcher", Process()),
    "Out of memory: Killed process 4242 (python) total-vm:1kB": ("SIGKILL", "kernel", Process("pid 4242", pid=4242)),
    "srun: error: n1: task 3: Segmentation fault (core dumped)": ("SIGSEGV", "scheduler", Process("task 3", host="n1")),
    "run.sh: line 7: 4242 Killed                  python train.py": ("SIGKILL", "shell", Process("pid 4242", pid=4242)),
    "zsh: segmentation fault (core dumped)  python train.py": ("SIGSEGV", "shell", Process()),
    "Killed: 9": ("SIGKILL", "shell", Process()),
    "Abort trap: 6": ("SIGABRT", "shell", Process()),
    "A worker was killed by signal 9. This could be caused by a lack of memory.": ("SIGKILL", "launcher", Process()),
    "[1]+  Killed                  nohup python train.py": ("SIGKILL", "shell", Process()),
    "shards:  33%|3 | 1/3 [00:10<00:20, 10.33s/it]Killed": ("SIGKILL", "shell", Process()),
}  # fmt: skip


@pytest.mark.parametrize("text", TELLERS)
def test_who_tells_of_a_death(text: str) -> None:
    death = death_of(text, 7)
    assert isinstance(death, Death)
    assert (death.name, death.teller, death.process) == TELLERS[text]
    assert death.line == 7
    assert any(word in text for word in WORDS)
    page = page_of(f"step 1\n{text}\n")
    assert page.outcome == "failure", "the line is looked at"


@pytest.mark.parametrize(
    "text",
    [
        "Killed two birds with one stone",
        "Terminated early at epoch 3",
        "Aborted request chatcmpl-123.",
        "Exited with exit code 0",
        "Process exited with code -1",
        "failed (exitcode: -1) local_rank: 0 (pid: 820) of binary: python",
        "Note: exit code 137 means that the container was killed for want of memory",
        "If a process exits with code 137, raise the limit",
        "a worker terminated by signal 15 is restarted",
        "prompt: 'why did my job end with exit code 139'",
        "Answer: The process was killed by signal 9 because it used too much memory.",
        "killed",
        "terminated",
        "quit",
        "interrupt",
        "srun: error: n1: task 0: Exited with exit code 1",
        "the tool exits with return code = 1",
        "Sending process 1234 closing signal SIGTERM",
        "[INFO] [launch.py:315:sigkill_handler] Killing subprocess 3353707",
        "processing signal 3 of 20",
        "exit code 130.5 is no code",
        "in case a process is killed by signal handlers",
        "segmentation fault handlers are installed",
        "kill_process_tree called: parent_pid=428723",
    ],
)
def test_words_that_tell_of_no_death(text: str) -> None:
    assert death_of(text, 1) is None
    assert page_of(f"step 1\n{text}\nstep 2").outcome in ("nothing", "exits")


def test_a_death_that_an_exception_tells_is_not_counted_again() -> None:
    text = TRACEBACK.replace(
        "ValueError: loss is nan", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
    )
    page = page_of(text)
    assert [group.type for group in page.who.groups] == ["RuntimeError"]


def test_an_abort_behind_an_exception_is_its_echo() -> None:
    page = page_of(TRACEBACK + "\nAborted (core dumped)")
    assert [(group.type, group.role) for group in page.who.groups] == [("ValueError", "root"), ("SIGABRT", "echo")]


def test_a_death_is_the_root_of_the_echoes_of_its_peers() -> None:
    echo = TRACEBACK.replace(
        "ValueError: loss is nan", "RuntimeError: NCCL error: remote process exited or there was an error"
    )
    page = page_of(echo + "\nE1 failed (exitcode: -9) local_rank: 3 (pid: 77) of binary: python")
    assert [(group.type, group.role) for group in page.who.groups] == [("SIGKILL", "root"), ("RuntimeError", "echo")]


def test_an_engine_whose_core_was_killed() -> None:
    words = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'Core_0': -9}"
    page = page_of(TRACEBACK.replace("ValueError: loss is nan", words))
    assert page.root is not None
    assert "'Core_0': -9" in page.root.message
    assert not page.who.has_only_echoes, "nothing else will tell of it"


def test_an_exception_that_tells_of_a_death_is_its_echo() -> None:
    words = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that"
    told = TRACEBACK.replace("ValueError: loss is nan", words)
    died = (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
    )
    assert [(group.type, group.role) for group in page_of(died + told).who.groups] == [
        ("SIGBUS", "root"), ("RuntimeError", "echo"),
    ]  # fmt: skip
    assert [(group.type, group.role) for group in page_of(told).who.groups] == [("RuntimeError", "root")]


@pytest.mark.parametrize(
    ("bar", "end", "name"),
    [
        (" 45%|####5     | 450/1000 [02:31<03:05,  2.97it/s]", "Killed", "SIGKILL"),
        (" 45%|####5     | 450/1000 [02:31<03:05,  2.97it/s, loss=2.31, lr=[1e-4, 2e-4]]", "Killed", "SIGKILL"),
        ("train:  0%|          | 0/1000 [00:00<?, ?img/s]", "Segmentation fault (core dumped)", "SIGSEGV"),
    ],
)
def test_what_a_shell_says_behind_a_progress_bar(bar: str, end: str, name: str) -> None:
    death = death_of(bar + end, 7)
    assert death is not None
    assert (death.name, death.text) == (name, end)
    assert death_of(f"{bar}{end} by the reviewer", 7) is None


def lines_before(text: str) -> list[tuple[str, int | None]]:
    page = page_of(text)
    shown = to_text(page)
    assert all(f"line before   line {number}: {line}" in shown for line, number in page.above)
    return list(page.above)


WHY = "8 experts in the settings, 4 in the checkpoint: giving up"


def test_what_was_printed_right_before_an_end_without_an_exception() -> None:
    asserted = "/src/ggml.c:3021: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed"
    loading, other = ("loading x.gguf", 1), ("step 1", 1)
    assert lines_before(f"loading x.gguf\n{asserted}\nAborted (core dumped)\n") == [loading, (asserted, 2)]
    srun = "srun: error: node7: task 3: Exited with exit code 1\nsrun: Terminating StepId=12.0\n"
    assert lines_before(f"step 1\n{WHY}\n\n{srun}") == [other, (WHY, 2)]
    elastic = (
        "W0504 10:00:02.1 8 torch/distributed/elastic/api.py:900] Sending process 821 closing signal SIGTERM\n"
        "E0504 10:00:12.1 8 torch/distributed/elastic/api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 820) of x\n"
    )
    table = TRACEBACK.replace("ValueError: loss is nan", "torch.elastic.errors.ChildFailedError: ")
    assert lines_before(f"step 1\n[rank0]: {WHY}\n{elastic}{table}\n") == [other, (WHY, 2)]


def test_lines_before_an_end_are_left_out_where_an_exception_tells_why() -> None:
    assert lines_before(f"step 1\n{TRACEBACK}\nsrun: error: node7: task 3: Exited with exit code 1\n") == []
    assert lines_before("    at the end of a source\nAborted (core dumped)\n") == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("May 04 10:05:00 n7 systemd[1]: a.service: Main process exited, code=killed, status=9/KILL", "SIGKILL"),
        ("May 04 10:05:00 n7 systemd[1]: a.service: Main process exited, code=dumped, status=11/SEGV", "SIGSEGV"),
        ("a.service: A process of this unit has been killed by the OOM killer.", "OUT_OF_MEMORY"),
        ('Thread 1 "python3" received signal SIGSEGV, Segmentation fault.', "SIGSEGV"),
        ("Program received signal SIGABRT, Aborted.", "SIGABRT"),
        ("timeout: sending signal TERM to command 'python'", "TIMEOUT"),
    ],
)
def test_deaths_as_services_and_debuggers_tell_them(line: str, name: str) -> None:
    page = page_of(f"step 1\n{line}\n")
    assert (page.outcome, page.root.type if page.root else "") == ("failure", name)


def test_a_limit_of_time_is_no_request() -> None:
    page = page_of(
        "timeout: sending signal TERM to command 'python'\nSIGTERM received, saving a checkpoint\nTerminated\n"
    )
    assert page.outcome == "failure"
    assert page.root is not None
    assert page.root.type == "TIMEOUT"


def test_a_unit_that_exits_with_a_code_of_its_own() -> None:
    page = page_of("n7 systemd[1]: a.service: Main process exited, code=exited, status=1/FAILURE\n")
    assert (page.outcome, [ended.code for ended in page.who.exits]) == ("exits", [1])


@pytest.mark.parametrize(
    "panic",
    [
        "thread 'main' panicked at src/server.rs:210:9:\nindex out of bounds: the len is 3 but the index is 7",
        "thread 'main' (77) panicked at src/server.rs:210:9:\nindex out of bounds: the len is 3 but the index is 7",
        "thread 'main' panicked at 'index out of bounds: the len is 3 but the index is 7', src/server.rs:210:9",
    ],
)
def test_a_panic_of_rust(panic: str) -> None:
    page = page_of(
        f"starting\n{panic}\nnote: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n"
    )
    assert page.root is not None
    assert page.root.message == "index out of bounds: the len is 3 but the index is 7"
    assert page.root.frame is not None
    assert (page.root.frame.file, page.root.frame.line) == ("src/server.rs", 210)
    lived = page_of(panic.replace("main", "worker-3") + "\nstep 1\nstep 2\nstep 3\n")
    assert lived.outcome == "nothing"


def test_what_the_driver_said_stands_beside_the_failure() -> None:
    said = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
    text = to_text(page_of(f"[ 8123.551] {said}\n{TRACEBACK}\n"))
    assert f"driver said   {said}" in text.replace("\n" + " " * 16, " ")
    assert page_of(f"May 04 10:00:00 n7 kernel: {said}\n").error_lines[0][1] == 1
