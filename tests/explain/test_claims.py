"""What a page claims of a log, one rule each: a log that proves it, and one that looks like it and does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from pydantic import BaseModel

from piecegraph.explain.evidence import Failure, Frame, Raised
from piecegraph.explain.frames import phase_of
from piecegraph.explain.from_logs import explain_logs
from piecegraph.explain.page import Page
from piecegraph.explain.render import to_text
from tests.explain.log.test_lines import OTHER, TRACEBACK, prefixed
from tests.explain.test_page import page_of


def run_python(folder: Path, script: str) -> Page:
    """The page about what a script prints."""
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=90,
        check=False,
    )
    return page_of(done.stdout)


def headline(page: Page) -> str:
    return to_text(page).split("\n")[0]


def roles(page: Page) -> list[tuple[str, str]]:
    return [(group.type.rpartition(".")[2], group.role) for group in page.who.groups]


# -- how many failed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (prefixed("[rank0]: ") + "\n" + prefixed("[rank1]: "), "2 processes failed alike"),
        (prefixed("[rank0]: ") + "\n" + prefixed("[rank0]: "), "1 process failed, printed 2 times"),
        (TRACEBACK + "\n" + prefixed("[rank0]: "), "1 process failed, printed 2 times"),
        (TRACEBACK + "\n" + TRACEBACK, "failed, printed 2 times"),
    ],
    ids=["two ranks", "one rank twice", "with and without a prefix", "no names"],
)
def test_processes_are_counted_and_not_prints(text: str, words: str) -> None:
    assert headline(page_of(text)) == f"ValueError: {words}"


def test_that_all_prints_carry_a_name_is_only_said_if_they_do() -> None:
    named, half = prefixed("[rank0]: "), TRACEBACK + "\n" + prefixed("[rank0]: ")
    words = "the lines of every traceback carry the name of their process"
    assert words in to_text(page_of(named))
    assert words not in to_text(page_of(half))


CALLED = TRACEBACK.replace("call last):\n", 'call last):\n  File "/srv/app/boot.py", line 3, in boot\n    main()\n')


def test_a_failure_that_is_logged_and_then_printed_with_its_callers_is_one() -> None:
    page = page_of(
        prefixed("(EngineCore_0 pid=9) ERROR 05-08 19:06:38 [core.py:9] ")
        + "\n"
        + prefixed("(EngineCore_0 pid=9) ", CALLED)
    )
    assert [(group.count, group.num_processes) for group in page.who.groups] == [(2, 1)]


def test_the_same_line_reached_on_two_ways_fails_twice() -> None:
    elsewhere = TRACEBACK.replace("line 12, in main", "line 99, in evaluate")
    assert len(page_of(TRACEBACK + "\n" + elsewhere).who.groups) == 2


def test_exits_are_counted_once() -> None:
    table = """\
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
        =====
        Root Cause (first observed failure):
        [0]:
          host      : n1
          rank      : 2 (local_rank: 2)
          exitcode  : 1 (pid: 77)
        ====="""
    text = "failed (exitcode: 1) local_rank: 2 (pid: 77) of binary: python\n" + TRACEBACK.replace(
        "ValueError: loss is nan", textwrap.dedent(table)
    )
    (only,) = page_of(text).who.exits
    assert (only.process.rank, only.code, only.is_first) == (2, 1, True)
    other = page_of("failed (exitcode: 1) local_rank: 3 (pid: 78) of binary: python\n" + text)
    assert len(other.who.exits) == 2, "another process is another exit"


# -- wrappers and what they quote


def test_the_original_traceback_of_a_worker_is_the_root(tmp_path: Path) -> None:
    page = run_python(tmp_path, """
        from torch._utils import ExceptionWrapper
        def fetch():
            raise KeyError("image")
        def read():
            try:
                fetch()
            except Exception:
                ExceptionWrapper(where="in DataLoader worker process 0").reraise()
        try:
            fetch()
        except Exception:
            wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
        wrapped.reraise()
        """)  # fmt: skip
    assert page.root is not None
    assert page.root.frame is not None
    assert (page.root.type, page.root.message, page.root.frame.function) == ("KeyError", "'image'", "fetch")
    assert "Caught KeyError in DataLoader worker process 0" in page.root.shown_as[0].message
    assert len(page.who.groups) == 1


def test_a_traceback_behind_another_is_not_its_original() -> None:
    assert len(page_of(TRACEBACK + "\n" + OTHER).who.groups) == 2


RAY = """\
Traceback (most recent call last):
  File "/srv/driver.py", line 9, in <module>
    ray.get(actor.ready.remote())
ray.exceptions.ActorDiedError: The actor died because of an error in its creation task, ray::Trainer.__init__() (pid=88)
  File "/srv/worker.py", line 3, in <module>
    import flash_attn
ModuleNotFoundError: No module named 'flash_attn'

During handling of the above exception, another exception occurred:

ray::Trainer.__init__() (pid=88, ip=10.0.0.7)
  File "/srv/worker.py", line 41, in __init__
    raise RuntimeError("cannot import the trainer")
RuntimeError: cannot import the trainer"""


def test_what_ray_brings_from_an_actor_is_the_root() -> None:
    page = page_of(RAY)
    assert page.root is not None
    assert (page.root.type, page.root.message) == ("ModuleNotFoundError", "No module named 'flash_attn'")
    assert [shown.type.rpartition(".")[2] for shown in page.root.shown_as] == ["RuntimeError", "ActorDiedError"]
    plain = page_of(TRACEBACK.replace("loss is nan", "ray::f is no name"))
    assert plain.root is not None
    assert plain.root.type == "ValueError"


def test_what_ray_brings_inside_of_what_it_brings() -> None:
    nested = """\
RuntimeError: The actor failed to import on the worker:

ray::Trainer.run() (pid=88)
  File "/srv/worker.py", line 2, in <module>
    import deep_gemm
ModuleNotFoundError: No module named 'deep_gemm'"""
    head = RAY.partition('\n  File "/srv/worker.py"')[0]
    page = page_of(f"{head}\n{nested}")
    assert page.root is not None
    assert page.root.message == "No module named 'deep_gemm'"
    assert len(page.root.shown_as) == 2


def test_a_failure_that_quotes_another_passes_it_on() -> None:
    message = "the size of tensor a (3) must match the size of tensor b (4)"
    cause = TRACEBACK.replace("loss is nan", message)
    server = OTHER.replace("loss is nan", "{'error': 'Internal server error: " + message + "'}")
    assert roles(page_of(cause + "\n" + server)) == [("ValueError", "root"), ("KeyError", "echo")]
    assert roles(page_of(server + "\n" + cause)) == [("ValueError", "root"), ("KeyError", "echo")]
    assert roles(page_of(cause + "\n" + OTHER)) == [("ValueError", "root"), ("KeyError", "other")]


def test_the_users_line_that_dynamo_quotes(tmp_path: Path) -> None:
    page = run_python(tmp_path, """
        import torch
        def forward(x):
            torch._dynamo.graph_break()
            return x + 1
        torch.compile(forward, fullgraph=True, backend="eager")(torch.ones(3))
        """)  # fmt: skip
    assert page.root is not None
    assert page.root.user_code is not None
    assert (page.root.user_code.file.rpartition("/")[2], page.root.user_code.line) == ("script.py", 4)
    assert "user code     " in to_text(page)
    said = page_of(TRACEBACK.replace("loss is nan", "loss is nan, from user code:") + "\n\nbye")
    assert said.root is not None
    assert said.root.user_code is None


class Config(BaseModel):
    size: int
    name: str


def test_the_further_lines_of_a_message() -> None:
    with pytest.raises(ValueError, match="size") as caught:
        Config(size="large", name="x")  # type: ignore[arg-type]
    page = page_of(TRACEBACK.replace("ValueError: loss is nan", f"pydantic_core.ValidationError: {caught.value}"))
    assert page.root is not None
    assert page.root.message == "1 validation error for Config"
    assert any("valid integer" in detail for detail in page.root.details)
    assert "valid integer" in to_text(page)
    lost = "RuntimeError: NCCL error: system error\nncclSystemError: it failed.\nLast error:\nno space in /dev/shm"
    assert "no space in /dev/shm" in to_text(page_of(TRACEBACK.replace("ValueError: loss is nan", lost)))
    other = page_of(TRACEBACK + "\nEpoch 2 is next\n  and so on")
    assert other.root is not None
    assert other.root.details == (), "what is printed below is no part of the message"


def test_a_check_that_failed_on_the_device() -> None:
    line = "/aten/Indexing.cu:1290: indexSelect: block: [{},0,0], thread: [9,0,0] Assertion `index < size` failed.\n"
    error = TRACEBACK.replace("loss is nan", "CUDA error: device-side assert triggered")
    text = to_text(page_of("".join(line.format(n) for n in range(64)) + error))
    assert text.count("Indexing.cu:1290: assertion `index < size` failed  (line 1)") == 1
    assert "Indexing.cu" not in to_text(page_of(line.format(0) + TRACEBACK)), "an error of the host is another matter"


# -- no failures


def test_a_traceback_that_was_logged_as_a_warning(tmp_path: Path) -> None:
    script = """
        import logging
        logging.basicConfig(format="{format}", level=logging.INFO)
        try:
            import no_such_module
        except ImportError:
            logging.{level}("an optional module failed to import", exc_info=True)
        for step in range(5):
            logging.info("step %d is done", step)
        """
    formats = ["%(asctime)s - %(name)s - %(levelname)s - %(message)s", "%(levelname)s:%(name)s:%(message)s"]
    for format in formats:
        mild = run_python(tmp_path, script.format(format=format, level="warning"))
        assert mild.outcome == "nothing"
        assert "no failure in this log: 1 traceback that the run went on after" in to_text(mild)
        assert "logged as less than an error" in to_text(mild)
        assert run_python(tmp_path, script.format(format=format, level="error")).outcome == "failure"


def test_a_warning_above_a_traceback_does_not_make_it_one() -> None:
    warning = "WARNING 05-08 19:06:38 [a.py:1] the cache is cold\n"
    assert page_of(warning + TRACEBACK + "\nbye\nbye\nbye\nbye").outcome == "failure"
    assert page_of(prefixed("WARNING 05-08 19:06:38 [a.py:1] ")).outcome == "failure", "nothing shows that it went on"


def test_a_side_thread(tmp_path: Path) -> None:
    script = """
        import threading
        thread = threading.Thread(target=lambda: [][1])
        thread.start()
        thread.join()
        {after}
        """
    page = run_python(tmp_path, script.format(after="[print('step', n) for n in range(5)]"))
    assert page.outcome == "nothing"
    assert "in a side thread" in to_text(page)
    assert run_python(tmp_path, script.format(after="")).outcome == "failure"


def test_a_run_that_was_interrupted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    # What is started in the background inherits that the signal is ignored.
    heed = "import signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script.write_text(f"{heed}print('step 1', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.05)  # until it sleeps
    os.kill(process.pid, signal.SIGINT)
    interrupted = process.communicate(timeout=60)[1]
    page = page_of(interrupted)
    assert page.outcome == "stopped"
    assert headline(page) == "no failure: the run was stopped on request (KeyboardInterrupt)"
    assert "script.py:4" in to_text(page)
    assert page_of(TRACEBACK + "\n" + interrupted).outcome == "failure", "it had failed before"


def test_what_falls_apart_behind_a_request_to_end_is_no_failure() -> None:
    asked = "INFO 05-08 19:06:38 [launcher.py:1] received signal SIGTERM\n"
    assert page_of(asked + TRACEBACK).outcome == "stopped"
    assert page_of(TRACEBACK + "\n" + asked).outcome == "failure"
    assert page_of("INFO 05-08 19:06:38 [a.py:1] will end when SIGTERM comes\n" + TRACEBACK).outcome == "failure"


def test_a_scheduler_that_ends_a_run_is_no_request() -> None:
    asked = "received signal SIGTERM\n"
    limit = "slurmstepd: error: *** JOB 83 ON n1 CANCELLED AT 2025-05-02T03:58:46 DUE TO TIME LIMIT ***"
    assert page_of(asked + limit).outcome == "failure"


def test_a_log_that_ends_with_an_error_line_shows_it() -> None:
    text = to_text(page_of("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lr"))
    assert "error line    line 2: train.py: error: unrecognized arguments: --lr" in text
    assert "error line" not in to_text(page_of("the error rate is 3 %\nbye"))


def test_the_exception_of_a_thread_explains_an_end_that_nothing_else_does() -> None:
    thread = f"Exception in thread Thread-3 (prefetch):\n{TRACEBACK}\n" + "waiting for data\n" * 5
    assert page_of(thread).outcome == "nothing"
    page = page_of(f"{thread}srun: error: n7: task 0: Exited with exit code 1\n")
    assert (page.outcome, roles(page)) == ("failure", [("ValueError", "root")])
    lost = OTHER.replace("KeyError: loss is nan", "RuntimeError: [gloo] Connection closed by peer")
    assert roles(page_of(thread + lost)) == [("ValueError", "root"), ("RuntimeError", "echo")]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            "triton.compiler.errors.CompilationError: at 3:11:\ndef add(x):\n    offs = tl.arange(0, 3)\n           ^\n"
            'ValueError("arange\'s range must be a power of 2")',
            ('ValueError("arange\'s range must be a power of 2")',),
        ),
        (
            "triton.compiler.errors.CompilationError: at 3:11:\ndef add(x):\n    offs = tl.arange(0, 3)\n           ^",
            (),
        ),
        (
            "tensorflow.errors_impl.InvalidArgumentError: Graph execution error:\n\nDetected at node a\n"
            "\nMatrix size-incompatible: In[0]: [32,10], In[1]: [12,4]\n\t [[{{node a/MatMul}}]] [Op:__inference_5]",
            ("Matrix size-incompatible: In[0]: [32,10], In[1]: [12,4]",),
        ),
    ],
    ids=["Triton", "Triton, told elsewhere", "TensorFlow"],
)
def test_what_a_message_says_at_its_end(message: str, told: tuple[str, ...]) -> None:
    page = page_of(TRACEBACK.replace("ValueError: loss is nan", message))
    assert page.root is not None
    assert page.root.details == told


def test_memory_that_another_process_holds_is_named() -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.15 GiB of which 1.20 GiB is free. Process 4711 has 60.00 GiB memory in use. Including non-PyTorch memory, "
        "this process has 17.95 GiB memory in use."
    )
    page = page_of(TRACEBACK.replace("ValueError: loss is nan", message))
    assert page.root is not None
    assert page.root.details == ("process 4711 held 60.00 GiB of this GPU",)
    assert "process 4711 held 60.00 GiB of this GPU\n" in to_text(page)


# -- several runs


def explained(text: str, folder: Path) -> Page:
    path = folder / "run.log"
    path.write_text(text)
    return explain_logs([path])


RUN = "Loading the settings of this machine\nworking\n{}\n"


@pytest.mark.parametrize(
    "start", ["nohup: ignoring input", "Loading the settings of this machine", "vLLM API server version 0.8.5"]
)
def test_the_last_run_is_told_of_and_the_others_are_counted(start: str, tmp_path: Path) -> None:
    run = f"{start}\nworking\n{{}}\n"
    page = explained(
        "".join(run.format(text) for text in (TRACEBACK, OTHER, TRACEBACK.replace("nan", "inf"))), tmp_path
    )
    assert page.root is not None
    assert page.root.message == "loss is inf"
    assert "run 3 of 3 in this log, the last that failed" in to_text(page)
    assert to_text(page).count("other run, lines ") == 2
    well = explained(run.format(TRACEBACK) + run.format("done"), tmp_path)
    assert "run 1 of 2 in this log, the last that failed" in to_text(well)


def test_a_line_that_is_said_again_and_again_begins_no_run(tmp_path: Path) -> None:
    step = "working on the next batch\n"
    page = explained(step * 3 + TRACEBACK + "\n" + step * 3 + OTHER, tmp_path)
    assert not page.other_runs
    assert len(page.who.groups) == 2


def test_a_program_that_python_cannot_read_begins_a_run(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("x = = 2\n")
    broken = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    ).stderr
    page = explained(TRACEBACK + "\n" + broken, tmp_path)
    assert page.root is not None
    assert page.root.type == "SyntaxError"
    assert len(page.other_runs) == 1
    imported = TRACEBACK.replace(
        "ValueError: loss is nan", '  File "/srv/app/a.py", line 1\n    x = = 2\nSyntaxError: invalid'
    )
    assert not explained(TRACEBACK + "\n" + imported, tmp_path).other_runs, "one that is imported is not the program"


# -- phases


@pytest.mark.parametrize(
    ("file", "function", "phase"),
    [
        ("/x/site-packages/torch/_dynamo/convert_frame.py", "compile_inner", "compile"),
        ("/x/site-packages/torch/_dynamo/eval_frame.py", "compile_wrapper", None),
        ("/x/site-packages/safetensors/torch.py", "load_file", "load"),
        ("/x/site-packages/safetensors/torch.py", "save_file", None),
        ("/x/site-packages/torch/distributed/distributed_c10d.py", "init_process_group", "init"),
        ("/x/site-packages/torch/distributed/distributed_c10d.py", "all_reduce", None),
        ("/x/site-packages/torch/cuda/graphs.py", "capture_end", "capture"),
        ("/x/site-packages/torch/cuda/graphs.py", "replay", None),
        ("/x/site-packages/triton/compiler/compiler.py", "compile", "compile"),
        ("/x/site-packages/triton/runtime/jit.py", "run", None),
    ],
)
def test_a_phase_is_seen_in_the_stack_and_not_in_what_every_call_goes_through(
    file: str, function: str, phase: str | None
) -> None:
    assert phase_of([Frame(file, 1, function)]) == phase


def test_that_a_phase_had_begun_is_no_proof_that_it_failed() -> None:
    text = "INFO 05-08 19:06:38 [a.py:1] Starting to load model foo...\n" + TRACEBACK
    page = page_of(text)
    assert page.phase.failed is None
    assert "begun         load" in to_text(page)


# -- the same page whatever the hash seed


def test_pages_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    lines = [line for line in TRACEBACK.split("\n")[:-1] for _ in range(4)]
    errors = [
        "ValueError: loss is nan 1",
        "KeyError: loss is nan 1",
        "TypeError: loss is nan 1",
        "OSError: loss is nan 1",
    ]
    path = tmp_path / "run.log"
    path.write_text("\n".join([*lines, *errors, "ValueErrorKeyError: : loss is nan 1loss is nan 1"]))
    code = "import sys; from piecegraph.explain.from_logs import explain_logs; print(explain_logs(sys.argv[1:]))"
    pages = {
        subprocess.run(
            [sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            text=True, timeout=60, check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }  # fmt: skip
    assert len(pages) == 1


def test_a_chain_of_interrupts_alone_is_an_interrupt() -> None:
    from piecegraph.explain.root_cause import triage
    from tests.explain.test_page import evidence

    stop, bad = (Raised(type=name, message="", frames=()) for name in ("KeyboardInterrupt", "ValueError"))
    assert triage(evidence(Failure(chain=(stop,), line=1))).is_stopped
    assert not triage(evidence(Failure(chain=(bad, stop), line=1))).is_stopped
