"""``piecegraph run``: real processes that fail, die, hang and succeed under the recorder."""

from __future__ import annotations

import ast
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from piecegraph.explain.evidence import Evidence, Failure
from piecegraph.explain.page import compose
from piecegraph.explain.render import to_text
from piecegraph.explain.run import hook
from piecegraph.explain.run.hook.data import MAX_FRAMES
from piecegraph.explain.run.launch import Ended
from piecegraph.explain.run.memory import OomKills, count_oom_kills
from piecegraph.explain.run.recorded_run import RecordedRun, fresh_folder
from piecegraph.explain.run.records import last_dump, read_records
from piecegraph.explain.run.run_evidence import evidence_of_records

DRIVER = """
import os, pickle, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
from piecegraph.explain.run.recorded_run import run_recorded
folder, *command = sys.argv[1:]
os.mkdir(f"{folder}/records")
done = run_recorded(command, Path(folder, "records"), os.environ)
Path(folder, "done").write_bytes(pickle.dumps(done))
"""


class Run:
    """A script run under the recorder, in a process of its own: signals are sent to it."""

    def __init__(self, folder: Path, script: str, *python: str) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        self.script.write_text(dedent(script))
        command = [sys.executable, "-c", DRIVER, str(folder), sys.executable, *python, str(self.script)]
        self.driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_until(self, name: str) -> None:
        """Until the script has made a file."""
        deadline = time.monotonic() + 30
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.02)

    def end(self) -> Evidence:
        self.stdout, self.stderr = self.driver.communicate(timeout=60)
        assert self.driver.returncode == 0, self.stderr
        self.done: RecordedRun = pickle.loads((self.folder / "done").read_bytes())
        assert self.done.evidence is not None
        assert self.done.problem is None
        return self.done.evidence


def record(folder: Path, script: str, *python: str) -> Evidence:
    return Run(folder, script, *python).end()


def summary(failure: Failure) -> tuple[str, int, list[str]]:
    """Kind, number of processes and the types of the chain."""
    return failure.kind, failure.count, [raised.type for raised in failure.chain]


def cli(*arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    code = "from piecegraph.cli.main import main; main()"
    command = [sys.executable, "-c", code, "run", *arguments]
    return subprocess.run(command, capture_output=True, check=False, timeout=60, **options)  # type: ignore[call-overload]


# -- what is recorded


def test_a_chain_is_recorded_with_its_frames_and_notes(tmp_path: Path) -> None:
    script = """\
        def inner():
            raise KeyError("k")
        def outer():
            try:
                inner()
            except KeyError as error:
                raise ValueError("v") from error
        try:
            outer()
        finally:
            int("x")
        """
    evidence = record(tmp_path, script)
    (failure,) = evidence.failures
    assert summary(failure) == ("exception", 1, ["KeyError", "ValueError", "ValueError"])
    first, second, third = failure.chain
    assert [frame.function for frame in first.frames] == ["outer", "inner"]
    assert (first.frames[-1].line, first.frames[-1].source) == (2, 'raise KeyError("k")')
    assert [raised.link for raised in failure.chain] == ["", "cause", "context"]
    assert (second.message, third.message) == ("v", "invalid literal for int() with base 10: 'x'")
    assert failure.certainty == "recorded"
    assert abs(failure.time_ns - time.time_ns()) < 60e9


def test_hard_exceptions(tmp_path: Path) -> None:
    script = """\
        import sys
        class Mute(Exception):
            def __str__(self):
                raise RuntimeError
        def down(n):
            return down(n + 1)
        found = []
        try:
            down(0)
        except RecursionError as error:
            found.append(error)
        noted = ValueError("x" * 30_000 + "\\udc80")
        noted.add_note("a note \\udc80")
        raise ExceptionGroup("all", [*found, noted, Mute()])
        """
    (failure,) = record(tmp_path, script).failures
    deep, noted, mute, group = failure.chain
    assert [raised.type for raised in failure.chain] == ["RecursionError", "ValueError", "Mute", "ExceptionGroup"]
    assert (len(deep.frames), deep.frames[0].function) == (MAX_FRAMES, "<module>")
    assert "left out" in deep.notes[-1]
    assert len(noted.message) < 21_000
    assert noted.message.endswith("more characters>")
    assert noted.notes == ("a note \\udc80",)
    assert mute.message == "<str() raised RuntimeError>"
    assert group.link == "cause"


def test_eight_processes_that_fail_together(tmp_path: Path) -> None:
    script = """\
        import multiprocessing, os
        def work(i, barrier):
            os.environ["RANK"] = str(i)
            barrier.wait()
            raise ValueError(f"rank {i} of 8")
        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            barrier = context.Barrier(8)
            found = [context.Process(target=work, args=(i, barrier)) for i in range(8)]
            for process in found: process.start()
            for process in found: process.join()
            raise SystemExit(1)
        """
    run = Run(tmp_path, script)
    evidence = run.end()
    first, launcher = evidence.failures
    assert summary(first) == ("exception", 8, ["ValueError"])
    assert sorted(process.rank for process in first.processes) == list(range(8))
    assert first.chain[0].frames[-1].function == "work"
    assert summary(launcher) == ("exception", 1, ["SystemExit"])
    assert run.stderr.count("Traceback") == 8
    assert "sitecustomize" not in run.stderr, "our own frames are in the program's output"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_that_is_killed_comes_before_what_follows_from_it(tmp_path: Path, method: str) -> None:
    script = f"""\
        import multiprocessing, pathlib, time, sys
        def work():
            pathlib.Path(sys.argv[0]).with_name("ready").write_text(str(multiprocessing.current_process().pid))
            time.sleep(60)
        if __name__ == "__main__":
            process = multiprocessing.get_context("{method}").Process(target=work)
            process.start()
            process.join()
            raise RuntimeError("the worker died")
        """
    run = Run(tmp_path, script)
    run.wait_until("ready")
    time.sleep(0.2)
    victim = int((tmp_path / "ready").read_text())
    os.kill(victim, signal.SIGKILL)
    evidence = run.end()
    first, second = evidence.failures
    assert (summary(first)[0], first.processes[0].pid) == ("killed", victim)
    assert summary(second) == ("exception", 1, ["RuntimeError"])
    if method != "forkserver":  # whose children are not ours to wait for: the server is told their status by a pipe
        assert first.chain[0].type == "SIGKILL"
        assert "no recorded process" in first.chain[0].message


def test_a_child_that_its_parent_kills_comes_last(tmp_path: Path) -> None:
    script = """\
        import multiprocessing, time
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        process.start()
        time.sleep(0.5)
        process.kill()
        process.join()
        raise RuntimeError("the cause")
        """
    first, second = record(tmp_path, script).failures
    assert summary(first) == ("exception", 1, ["RuntimeError"])
    assert summary(second) == ("killed", 1, ["SIGKILL"])
    assert f"sent by pid {first.processes[0].pid}" in second.chain[0].message


def test_a_hung_run_that_is_interrupted_shows_where_it_hung(tmp_path: Path) -> None:
    script = """\
        import multiprocessing, pathlib, signal, sys, time
        def wait_for_peers():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            pathlib.Path(sys.argv[0]).with_name("ready").touch()
            time.sleep(60)
        process = multiprocessing.get_context("fork").Process(target=wait_for_peers, name="worker-7")
        process.start()
        def leave(*_):
            process.terminate()
            process.join()
            sys.exit(9)
        signal.signal(signal.SIGTERM, leave)
        process.join()
        """
    run = Run(tmp_path, script)
    run.wait_until("ready")
    run.driver.send_signal(signal.SIGTERM)
    comm = Path("/proc/self/comm").read_text().strip()
    evidence = run.end()
    assert run.done.ended == Ended(run.done.ended.pid, 9 << 8, signal.SIGTERM, f"{comm} (pid {os.getpid()})")
    hung = next(failure for failure in evidence.failures if failure.kind == "interrupted")
    assert [raised.frames[-1].function for raised in hung.chain] == ["wait_for_peers"]
    assert hung.chain[0].frames[-1].source == "time.sleep(60)"


COUNT_INTERRUPTS = """\
        import pathlib, signal, sys, time
        got = []
        signal.signal(signal.SIGINT, lambda *_: got.append(1))
        pathlib.Path(sys.argv[0]).with_name("ready").touch()
        end = time.monotonic() + 30
        while not got and time.monotonic() < end: time.sleep(0.05)
        end = time.monotonic() + 1  # for a second one
        while time.monotonic() < end: time.sleep(0.05)
        sys.exit(len(got) + 40)
        """


def test_an_interrupt_is_passed_on_once(tmp_path: Path) -> None:
    run = Run(tmp_path, COUNT_INTERRUPTS)
    run.wait_until("ready")
    run.driver.send_signal(signal.SIGINT)
    (failure,) = run.end().failures
    assert run.done.ended.exit_code == 41
    assert summary(failure) == ("exception", 1, ["SystemExit"])
    assert (failure.chain[0].message, failure.chain[0].frames[0].line) == ("sys.exit(41)", 9)


TERMINAL = """
import os, pty, sys, time
from pathlib import Path
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
os.write(terminal, b"\\x03")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_an_interrupt_from_a_terminal_is_not_passed_on_a_second_time(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(COUNT_INTERRUPTS))
    main = ["-c", "from piecegraph.cli.main import main; main()", "run", "--", sys.executable, str(script)]
    command = [sys.executable, "-c", TERMINAL, str(tmp_path / "ready"), *main]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "41\n", done.stderr


def test_a_thread_that_fails_and_one_that_is_no_failure(tmp_path: Path) -> None:
    script = """\
        import threading
        def fail(): raise LookupError("in a thread")
        thread = threading.Thread(target=fail)
        thread.start(); thread.join()
        raise SystemExit(5)
        """
    first, second = record(tmp_path, script).failures
    assert summary(first) == ("thread", 1, ["LookupError"])
    assert summary(second) == ("exception", 1, ["SystemExit"])


def test_a_fatal_signal_has_a_stack(tmp_path: Path) -> None:
    script = """\
        import ctypes
        def crash(): ctypes.string_at(0)
        crash()
        """
    run = Run(tmp_path, script)
    (failure,) = run.end().failures
    assert run.done.ended.exit_code == 128 + signal.SIGSEGV
    assert (failure.kind, failure.chain[0].message) == ("signal", "Segmentation fault")
    assert "crash" in [frame.function for frame in failure.chain[0].frames]
    assert run.stderr == "", "the dump goes to the record"


def test_a_program_that_wants_its_fatal_stacks_itself_gets_them(tmp_path: Path) -> None:
    script = "import ctypes, faulthandler\nfaulthandler.enable()\nctypes.string_at(0)"
    run = Run(tmp_path, script)
    (failure,) = run.end().failures
    assert summary(failure) == ("signal", 1, ["SIGSEGV"])
    assert "Segmentation fault" in run.stderr


def test_a_subprocess_of_a_subprocess(tmp_path: Path) -> None:
    script = """\
        import subprocess, sys
        if len(sys.argv) < 4:
            sys.exit(subprocess.call([sys.executable, *sys.argv, "deeper"]))
        raise OSError("at the bottom")
        """
    first, *others = record(tmp_path, script).failures
    assert summary(first) == ("exception", 1, ["OSError"])
    assert [summary(other) for other in others] == [("exception", 3, ["SystemExit"])]


def test_a_subprocess_that_was_only_tried_out_is_not_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """\
        import subprocess, sys, time
        subprocess.call([sys.executable, "-c", "import no_such_package"], stderr=subprocess.DEVNULL)
        time.sleep(0.3)
        raise RuntimeError("the cause")
        """
    run = Run(tmp_path, script)
    run.end()
    monkeypatch.setattr("piecegraph.explain.run.endings._SOON_NS", 200_000_000)
    evidence = evidence_of_records(read_records(tmp_path / "records")[0], run.done.ended)
    assert [summary(failure)[2] for failure in evidence.failures] == [["RuntimeError"], ["ModuleNotFoundError"]]


@pytest.mark.parametrize(
    "tell",
    ["traceback.print_exc()", "logging.getLogger().exception('failed')", "''.join(traceback.format_exception(error))"],
)
def test_an_engine_that_logs_its_cause_and_kills_itself(tmp_path: Path, tell: str) -> None:
    script = f"""\
        import logging, os, signal, traceback
        try:
            {{}}["weights"]
        except KeyError as error:
            {tell}
        os.kill(os.getpid(), signal.SIGKILL)
        """
    run = Run(tmp_path, script)
    (failure,) = run.end().failures
    assert summary(failure) == ("exception", 1, ["KeyError"])
    assert "sitecustomize" not in run.stderr


def test_an_exception_that_was_handled_long_ago_is_no_failure(tmp_path: Path) -> None:
    script = """\
        import traceback, sys
        try: import no_such_package
        except ImportError: traceback.print_exc()
        raise ValueError("the cause")
        """
    (failure,) = record(tmp_path, script).failures
    assert summary(failure) == ("exception", 1, ["ValueError"])


def test_hooks_of_the_program_that_do_not_pass_on_are_no_hole(tmp_path: Path) -> None:
    script = """\
        import sys
        sys.excepthook = lambda *_: print("mine", file=sys.stderr)
        1 / 0
        """
    run = Run(tmp_path, script)
    (failure,) = run.end().failures
    assert summary(failure) == ("exception", 1, ["ZeroDivisionError"])
    assert run.stderr == "mine\n"


def test_exec_is_not_a_death(tmp_path: Path) -> None:
    script = """\
        import os, sys
        try: os.execv("/no/such/file", ["x"])
        except OSError: pass
        os.execvp(sys.executable, [sys.executable, "-c", "raise ValueError('after exec')"])
        """
    (failure,) = record(tmp_path, script).failures
    assert summary(failure) == ("exception", 1, ["ValueError"])


def test_isolated_python_is_said_to_have_written_nothing(tmp_path: Path) -> None:
    (failure,) = record(tmp_path, "1 / 0", "-I").failures
    assert failure.chain[0].type == "exit code 1"
    assert "wrote a record" in failure.chain[0].message


def test_ranks_are_not_inherited(tmp_path: Path) -> None:
    script = """\
        import os, subprocess, sys
        if "RANK" not in os.environ:
            sys.exit(subprocess.call([sys.executable, *sys.argv], env={**os.environ, "RANK": "3"}))
        subprocess.call([sys.executable, "-c", "raise ValueError"])
        raise RuntimeError
        """
    evidence = record(tmp_path, script)
    labels = {failure.chain[0].type: failure.processes[0].label for failure in evidence.failures}
    assert labels["RuntimeError"] == "rank3"
    assert labels["ValueError"].endswith("(child of rank3)")
    assert [process.rank for process in evidence.processes] == [None, 3, None]


def test_phases(tmp_path: Path) -> None:
    script = """\
        def load_model(): raise OSError("no such file")
        load_model()
        """
    evidence = record(tmp_path, script)
    assert [(milestone.phase, milestone.state) for milestone in evidence.milestones] == [("load", "failed")]


def test_a_torchrun_job_names_the_rank_that_failed_first(tmp_path: Path) -> None:
    script = """\
        import time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            time.sleep(0.3)
            raise ValueError("rank 1 has no weights")
        dist.barrier()
        """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    evidence = record(tmp_path, script, *launcher)
    first, *echoes = evidence.failures
    assert summary(first) == ("exception", 1, ["ValueError"])
    assert [(process.label, process.rank) for process in first.processes] == [("rank1", 1)]
    assert {process.rank for echo in echoes for process in echo.processes} == {0, 2, None}
    assert any(echo.chain[-1].type.endswith("ChildFailedError") for echo in echoes)
    assert sorted(process.rank for process in evidence.processes if process.rank is not None) == [0, 1, 2]


# -- processes that are killed


def test_a_killed_process_is_told_with_its_name_and_last_lines(tmp_path: Path) -> None:
    script = """\
        import multiprocessing, os, subprocess, sys, time
        def work():
            print("step 1"); sys.stderr.write("step 2\\n"); print("step", 3)
            subprocess.run(["sh", "-c", f"kill -9 {os.getpid()}"])
            time.sleep(60)
        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=work, name="engine-3")
            process.start()
            process.join()
            sys.exit(1)
        """
    run = Run(tmp_path, script)
    evidence = run.end()
    killed = evidence.failures[0]
    assert (summary(killed), killed.processes[0].label) == (("killed", 1, ["SIGKILL"]), "engine-3")
    assert killed.last_lines == ("step 1", "step 2", "step 3"), "buffered output, too"
    assert [(ended.process.label, ended.code, ended.is_first) for ended in evidence.exits] == [
        ("script.py", 1, False),
        ("engine-3", -9, True),
    ]
    page = to_text(compose(evidence))
    assert "last printed  step 1\n                step 2\n                step 3\n" in page
    assert "ended         engine-3" in page

    def told(kills: OomKills) -> tuple[str, list[str]]:
        found = evidence_of_records(read_records(tmp_path / "records")[0], run.done.ended, kills)
        return found.failures[0].chain[0].message, [known.id for known in compose(found).known]

    assert told(OomKills())[0].startswith("sent by no recorded process: by a scheduler")
    assert told(OomKills())[1] == ["process-killed"]
    assert told(OomKills(0, 2))[0].endswith("likely by the kernel, which killed 2 for memory meanwhile")
    message, known = told(OomKills(1, 2))
    assert "but by the kernel, for want of memory: it counts 1 such" in message
    assert known == ["host-oom-killed", "process-killed"]


def test_a_process_is_told_whenever_it_is_killed(tmp_path: Path) -> None:
    script = """\
        import subprocess, sys, time
        killed = []
        for delay in (0, 0.005, 0.01, 0.015, 0.02, 0.04):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            time.sleep(delay)
            subprocess.run(["sh", "-c", f"kill -9 {child.pid}"])
            child.wait()
            killed.append(child.pid)
        print(*killed)
        raise RuntimeError("children died")
        """
    run = Run(tmp_path, script)
    evidence = run.end()
    told = {process.pid for failure in evidence.failures[:-1] for process in failure.processes}
    assert told == set(map(int, run.stdout.split()))
    assert {failure.chain[0].type for failure in evidence.failures[:-1]} == {"SIGKILL"}
    assert summary(evidence.failures[-1]) == ("exception", 1, ["RuntimeError"])


def test_a_process_that_kills_itself_is_no_echo(tmp_path: Path) -> None:
    (failure,) = record(tmp_path, "import os; os.kill(os.getpid(), 9)").failures
    assert failure.chain[0].message == "the process sent it to itself"
    page = compose(evidence_of_records(read_records(tmp_path / "records")[0], Ended(1, 9)))
    assert not page.who.has_only_echoes
    assert page.known == (), "nothing was done to it from outside"


def test_a_warning_of_a_scheduler_is_passed_on(tmp_path: Path) -> None:
    script = """\
        import pathlib, signal, sys, time
        def save(*_): print("saved"); sys.exit(5)
        signal.signal(signal.SIGUSR1, save)
        pathlib.Path(sys.argv[0]).with_name("ready").touch()
        time.sleep(30)
        """
    run = Run(tmp_path, script)
    run.wait_until("ready")
    run.driver.send_signal(signal.SIGUSR1)
    run.end()
    assert (run.done.ended.exit_code, run.done.ended.interrupted_by, run.stdout) == (5, None, "saved\n")


@pytest.mark.parametrize(
    ("group", "file", "expected"),
    [
        ("0::/job/step", "job/step/memory.events", 3),
        ("0::/job/step", "memory.events", 3),
        ("4:cpu,memory:/job", "memory/job/memory.oom_control", 3),
        ("4:memory:/docker/abc", "memory/memory.oom_control", 3),
        ("0::/", "nothing", 0),
    ],
)
def test_kills_of_the_own_group_are_counted(tmp_path: Path, group: str, file: str, expected: int) -> None:
    for path, text in (
        (f"sys/fs/cgroup/{file}", "low 0\noom 4\noom_kill 3\n"),
        ("proc/self/cgroup", f"9:pids:/\n{group}\n"),
        ("proc/vmstat", "nr_free_pages 9\noom_kill 7\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    kills = count_oom_kills(tmp_path)
    assert kills == OomKills(expected, 7)
    assert kills.since(OomKills(1, 8)) == OomKills(max(0, expected - 1), 0)
    assert count_oom_kills(tmp_path / "none") == OomKills()


# -- nothing is changed


def test_success_adds_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1]); print('err', file=sys.stderr)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = cli("--", sys.executable, "-c", code, input=bytes(range(256)), env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, bytes(range(256))[::-1], b"err\n")
    assert list(tmp_path.iterdir()) == []


def test_output_of_a_failure_comes_first_and_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('out\\r\\n', end='')\ntry: os.kill(2**22 + 1, 9)\nfinally: print('err')\n")
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, check=False)
    done = cli(sys.executable, str(script))
    assert done.returncode == plain.returncode == 1
    assert done.stdout == plain.stdout
    assert done.stderr.startswith(plain.stderr + b"\npiecegraph run: "), done.stderr


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
def test_exit_codes_pass_through(command: str, code: int) -> None:
    assert cli("--", "sh", "-c", command).returncode == code


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    missing, closed = cli("--", "no-such-program"), cli("--", str(tmp_path))
    assert (missing.returncode, closed.returncode) == (127, 126)
    assert missing.stderr.startswith(b"error: PG612 no-such-program cannot be started: No such file")
    assert closed.stderr.startswith(b"error: PG612 ")


def test_the_users_sitecustomize_and_path_are_kept(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.users_own = __file__")
    code = "import sys, sitecustomize; print(sys.users_own == sitecustomize.__file__, sys.path)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    done = cli("--", sys.executable, "-c", code, env=environment)
    assert done.stdout == plain.stdout
    assert done.stdout.startswith(b"True")


def test_signals_python_ignores_are_restored() -> None:
    assert cli("--", "sh", "-c", "yes | head -1").stderr == b""


def test_a_process_that_cannot_write_its_record_goes_on() -> None:
    done = cli("--", "sh", "-c", f"ulimit -f 0; exec {sys.executable} -c 'print(1); raise SystemExit(7)'")
    assert (done.returncode, done.stdout) == (7, b"1\n")


def test_the_hook_is_written_for_old_pythons() -> None:
    for file in Path(hook.__file__).parent.glob("*.py"):
        ast.parse(file.read_text(), feature_version=(3, 9))


def test_the_hook_imports_nothing_heavy() -> None:
    code = "import sys; print(*sys.modules)"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    recorded = cli("--", sys.executable, "-c", code)
    added = set(recorded.stdout.split()) - set(plain.stdout.split())
    added = {name for name in added if not name.startswith(b"_piecegraph_recorder")}
    assert added <= {b"__future__", b"_json", b"atexit", b"faulthandler", b"fcntl", b"sitecustomize"}


# -- folders


def test_records_are_kept_in_a_folder_of_their_own(tmp_path: Path) -> None:
    for _ in range(2):
        done = cli("--out", str(tmp_path / "kept"), "--", sys.executable, "-c", "1 / 0")
        assert done.returncode == 1
    first, second = sorted((tmp_path / "kept").iterdir())
    for folder in (first, second):
        assert {"page.txt", "page.md", "page.html", "page.json"} < {file.name for file in folder.iterdir()}
        records, num_unreadable = read_records(folder)
        assert [record.code for record in records] == [1]
        assert num_unreadable == 1, "page.json is no record"
    assert f"records: {second}" in done.stderr.decode() or f"records: {first}" in done.stderr.decode()


def test_folders_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    done = cli("--out", str(tmp_path / "open"), "--", "true")
    assert done.returncode == 2
    assert b"PG611" in done.stderr
    assert b"everybody may write" in done.stderr
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(Exception, match="PG611 .*somebody else"):
        fresh_folder(tmp_path)


def test_a_record_of_another_version_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "1-1.json").write_text(json.dumps({"schema": 99}))
    (tmp_path / "2-1.json").write_text("{")
    assert read_records(tmp_path) == ([], 2)


def test_the_last_dump_of_a_file_counts() -> None:
    thread = 'Thread 0x2 (most recent call first):\n  File "b.py", line 2 in g\n\n'
    current = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n  File "a.py", line 9 in m\n'
    dump = last_dump(thread + current + f"Fatal Python error: Aborted\n\n{current}\n{thread}Extension modules: x\n")
    assert dump is not None
    assert (dump.fatal, dump.num_threads, [frame.function for frame in dump.frames]) == ("Aborted", 2, ["m", "f"])
    asked = last_dump(current + thread + current)
    assert asked is not None
    assert (asked.fatal, asked.num_threads) == ("", 2)
    assert last_dump("") is None
