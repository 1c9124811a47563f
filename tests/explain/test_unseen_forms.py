# ruff: noqa: E501 - messages stand here as they are printed
"""Forms of failing that logs of other people have: each as a stand-in prints it, and what only looks like it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from piecegraph.explain.catalogue import load_catalogue
from piecegraph.explain.frames import place_of
from piecegraph.explain.from_logs import explain_text
from piecegraph.explain.page import Page
from piecegraph.explain.render import to_text
from tests.explain.log.test_lines import TRACEBACK

CATALOGUE = load_catalogue()


def page_of(text: str) -> Page:
    return explain_text(textwrap.dedent(text), CATALOGUE)


def roles(page: Page) -> list[tuple[str, str]]:
    return [(group.type, group.role) for group in page.who.groups]


def known(page: Page) -> list[str]:
    return [match.id for match in page.known if match.is_of_root]


# -- deaths


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("slurmstepd: error: Job 83 exceeded memory limit (1044 > 1024), being killed", "OUT_OF_MEMORY"),
        ("slurmstepd: error: Exceeded step memory limit at some point.", "OUT_OF_MEMORY"),
        ("srun: error: n10: task 0: Out Of Memory", "OUT_OF_MEMORY"),
        ("(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker PID: 42 Worker exit type: SYSTEM_ERROR", "process died"),
        ("Process exited with code 3221225477", "0xC0000005"),
        ("Exception Code: 0xC0000005#####| 28/28 [01:41<00:00,  3.79s/it]", "0xC0000005"),
    ],
)  # fmt: skip
def test_deaths_that_a_line_tells(line: str, name: str) -> None:
    page = page_of(f"step 1 of 3\n{line}\n")
    assert page.root is not None
    assert page.root.type == name


@pytest.mark.parametrize(
    "line",
    [
        "memory limit of the job: 1024 MiB",
        "exceeded the memory budget, evicting 3 blocks",
        "a worker died of boredom (joke of the day)",
        "Exception Code: none",
        "the process exited with code 3",
    ],
)
def test_words_that_look_like_those_deaths(line: str) -> None:
    assert page_of(f"step 1 of 3\n{line}\n").root is None


def test_a_lost_ray_worker_is_not_said_to_have_wanted_memory() -> None:
    page = page_of(
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. "
        "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage.\n"
    )
    assert known(page) == []
    assert "memory" not in to_text(page).split("\n")[0]


def test_a_kill_for_want_of_memory_is_one_death() -> None:
    killed = "job.sh: line 3:  8156 Killed                  python train.py\n"
    for_memory = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup.\n"
    assert roles(page_of(killed + for_memory)) == [("OUT_OF_MEMORY", "root"), ("SIGKILL", "echo")]
    assert roles(page_of(killed)) == [("SIGKILL", "root")]


def test_a_step_that_is_cancelled_behind_a_death_is_its_echo() -> None:
    cancelled = "slurmstepd: error: *** STEP 83.0 ON n10 CANCELLED AT 2026-05-17T17:58:10 ***\n"
    assert roles(page_of("srun: error: n10: task 0: Out Of Memory\n" + cancelled)) == [
        ("OUT_OF_MEMORY", "root"),
        ("CANCELLED", "echo"),
    ]
    assert roles(page_of(cancelled)) == [("CANCELLED", "root")]


def test_of_a_long_line_the_words_that_tell_are_shown() -> None:
    arguments = ", ".join(f"'--argument-{number}'" for number in range(40))
    page = page_of(
        f"[2026-07-20 15:45:13,982] [ERROR] [launch.py:321:sigkill_handler] [{arguments}] exits with return code = -7\n"
    )
    assert page.root is not None
    assert page.root.message.endswith("exits with return code = -7")


def test_a_progress_bar_in_front_of_a_death_is_left_out() -> None:
    line = "slurmstepd: error: *** JOB 42 ON n1 CANCELLED AT 2026-04-14T16:17:16 DUE TO TIME LIMIT ***"
    page = page_of(f" 22%|##   | 11/50 [1:57:05<6:54:42, 638.01s/it, loss=0.3]{line}\n")
    assert page.root is not None
    assert page.root.message == line


def test_the_place_where_a_death_was_noticed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, torch\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): os.kill(os.getpid(), signal.SIGBUS)\n"
        "if __name__ == '__main__':\n"
        "    for batch in torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context='fork'): pass\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=False)
    page = explain_text(done.stdout + done.stderr, CATALOGUE)
    assert page.root is not None
    assert page.root.type == "SIGBUS"
    assert page.notice is not None
    assert page.notice.reached_from is not None
    assert page.notice.reached_from.line == 6
    assert "noticed at" in to_text(page)
    assert "this log holds no frames of it" in to_text(page), "those of the process that noticed are not its own"


def test_a_failure_that_raises_has_no_notice() -> None:
    assert page_of(TRACEBACK).notice is None


def test_errors_that_were_logged_before_a_process_died() -> None:
    reason = "[rank0]:[E623 21:21:18.894757790 ProcessGroupNCCL.cpp:818] [Rank 0] Some collective has failed\n"
    near = page_of(reason + "step 2\nFatal Python error: Aborted\n")
    assert "error before" in to_text(near)
    assert "error before" not in to_text(page_of(reason + "step\n" * 300 + "Fatal Python error: Aborted\n"))
    assert "error before" not in to_text(page_of(reason + TRACEBACK)), "an exception says itself what was wrong"


@pytest.mark.parametrize("stack", ["Stack", "Current thread 0x00001a2c"])
def test_a_crash_on_windows(stack: str) -> None:
    page = page_of(
        f"""\
        loading
        Windows fatal exception: access violation

        {stack} (most recent call first):
          File "D:\\app\\.venv\\Lib\\site-packages\\torch\\cuda\\__init__.py", line 182 in is_available
          File "D:\\app\\main.py", line 12 in <module>

        Process exited with code 3221225477
        """
    )
    assert roles(page) == [("Windows fatal exception", "root"), ("0xC0000005", "echo")]
    assert page.root is not None
    assert page.root.frame is not None
    assert page.root.frame.function == "is_available"
    assert known(page)[:1] == ["segmentation-fault"]
    assert "carry the name of their process" not in to_text(page)


@pytest.mark.parametrize(
    "line",
    ["*** Error in `python3': free(): invalid pointer: 0x00007fc39a4cfb80 ***", " " * 90 + "free(): invalid pointer"],
)
def test_the_words_of_the_c_library_are_the_reason_of_an_abort(line: str) -> None:
    page = page_of(f"step 2\n{line}\nAborted (core dumped)\n")
    assert page.root is not None
    assert (page.root.type, page.root.message) == ("SIGABRT", line.strip())
    quoted = page_of(
        f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    {line.strip()}\nKeyError: 3\n'
    )
    assert roles(quoted) == [("KeyError", "root")]


def test_a_worker_that_aborts_is_noticed_by_its_loader() -> None:
    crash = (
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: initialization error\n\n"
    )
    told = TRACEBACK.replace(
        "ValueError: loss is nan", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Aborted."
    )
    assert roles(page_of(crash + told)) == [("c10::Error", "root"), ("RuntimeError", "echo")]
    assert page_of(crash + told).notice is not None
    assert roles(page_of(crash + TRACEBACK)) == [("c10::Error", "root"), ("ValueError", "other")]


# -- what was said before, or elsewhere


@pytest.mark.parametrize(
    "line",
    [
        "[06/21/2026-01:30:42] [TRT-LLM] [RANK 0] [E] Failed to initialize executor on rank 0",
        "[TensorRT-LLM][ERROR] Assertion failed: mpiSize == tp * pp (worldConfig.cpp:80)",
        "n3:3778851:3779883 [4] ibvwrap.c:130 NCCL WARN Call to ibv_create_qp failed",
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
        "There are not enough slots available in the system to satisfy the 8",
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 8192 MiB on device 0: cudaMalloc failed: out of memory",
        "srv    load_model: failed to load model, '/models/x.gguf'",
        "2026-05-04 10:00:00,101 sagemaker-training-toolkit ERROR    Reporting training FAILURE",
        'ErrorMessage "ValueError: bad sample"',
        "E       RuntimeError: CUDA error: out of memory",
        "E       assert torch.Size([3, 5]) == (3, 4)",
        "FAILED tests/test_a.py::test_forward - assert torch.Size([3, 5]) == (3, 4)",
        "2026-06-12 20:49:44 RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ],
)
def test_errors_as_programs_print_them(line: str) -> None:
    (only,) = page_of(f"step 1\n{line}\n").error_lines
    assert only[0] in line
    echo = page_of(
        f"{line}\n" + TRACEBACK.replace("ValueError: loss is nan", "RuntimeError: Executor worker returned error")
    )
    assert echo.who.has_only_echoes
    assert "error before" in to_text(echo)
    assert "nothing in this log reads like that" not in to_text(echo)


def test_what_is_logged_as_less_is_no_error() -> None:
    assert (
        page_of(
            "step\n2026-06-12 20:49:44 INFO retry: ValueError: busy\nNCCL INFO all WARN lines are off\n"
        ).error_lines
        == ()
    )


def test_an_exception_behind_a_bare_time_is_no_logger() -> None:
    page = page_of("\n".join(f"2026-06-12 20:49:44 {line}" for line in TRACEBACK.rstrip().split("\n")))
    assert page.root is not None
    assert (page.root.type, page.root.message) == ("ValueError", "loss is nan")


@pytest.mark.parametrize("end", ["returned non-zero exit status 1.", "died with <Signals.SIGKILL: 9>."])
def test_the_end_of_a_long_command_is_shown(end: str) -> None:
    command = f"subprocess.CalledProcessError: Command 'train\n--lr=1\n--resolution=512' {end}"
    page = page_of(TRACEBACK.replace("ValueError: loss is nan", command))
    assert len(page.who.groups) == 1, "the signal is a part of the message"
    assert page.root is not None
    assert page.root.details == (f"--resolution=512' {end}",)


def test_the_error_of_a_compiler_in_an_indented_report() -> None:
    page = page_of(
        """\
        Building wheels for collected packages: kern
          error: subprocess-exited-with-error
              gcc -c kern.cpp -o kern.o
              gcc: fatal error: cannot execute 'cc1plus': No such file or directory
          ERROR: Failed building wheel for kern
        """
    )
    assert ("gcc: fatal error: cannot execute 'cc1plus': No such file or directory", 4) in page.error_lines


def test_the_source_of_a_frame_is_no_error_line() -> None:
    page = page_of(TRACEBACK.replace("    step(batch)", "    error: int = step(batch)"))
    assert page.error_lines == ()


def test_a_message_in_front_of_a_traceback_that_is_cut_off() -> None:
    text = "!!! Exception during processing !!! HIP error: invalid device function\n" + "\n".join(
        TRACEBACK.split("\n")[:3]
    )
    assert "HIP error: invalid device function" in to_text(page_of(text))


COMMAND = """\
Traceback (most recent call last):
  File "/usr/lib/python3.12/subprocess.py", line 571, in run
    raise CalledProcessError(retcode, process.args,
subprocess.CalledProcessError: Command '['cl', 'main.cpp']' returned non-zero exit status 2.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/srv/build.py", line 350, in compile
    raise CompileError(output) from e
build.CompileError: it did not compile
Output:
main.cpp(3): fatal error C1083: Cannot open include file: 'omp.h'
"""


def test_what_a_command_said_is_found_where_it_is_quoted() -> None:
    page = page_of(COMMAND)
    assert page.root is not None
    assert page.root.details == ("main.cpp(3): fatal error C1083: Cannot open include file: 'omp.h'",)
    other = page_of(COMMAND.replace("subprocess.CalledProcessError", "ValueError"))
    assert other.root is not None
    assert other.root.details == (), "what is raised later does not explain it"


def test_a_line_that_tells_of_an_end_does_not_begin_a_run() -> None:
    dying = (
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
    )
    assert page_of(dying * 4).run_number == 1
    assert page_of(dying * 4).other_runs == ()
    starting = "Launching the trainer of the day\n"
    assert len(page_of((starting + TRACEBACK + "\n") * 2).other_runs) == 1


def test_what_another_process_prints_late_is_no_progress() -> None:
    late = "Starting to load model /models/tiny\n"
    again = TRACEBACK.replace("line 12, in main", "line 90, in serve")
    assert roles(page_of(f"{TRACEBACK}\n{late}{again}\n")) == [("ValueError", "root"), ("ValueError", "echo")]
    other = again.replace("loss is nan", "loss is inf")
    assert roles(page_of(f"{TRACEBACK}\n{late}{other}\n"))[1] == ("ValueError", "survived")


# -- advice

OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. Of the allocated memory 59 GiB is allocated by PyTorch, and {cached} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."


@pytest.mark.parametrize(
    ("asked", "cached", "fit"), [("512.00 MiB", "78.23 MiB", "does not fit"), ("1.50 GiB", "3.00 GiB", "fits")]
)
def test_segments_are_advised_where_memory_is_fragmented(asked: str, cached: str, fit: str) -> None:
    page = page_of(TRACEBACK.replace("ValueError: loss is nan", OUT.format(asked=asked, cached=cached)))
    assert [suggestion.fit for suggestion in page.suggestions] == [fit]


def test_shared_memory_is_memory() -> None:
    message = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit."
    page = page_of(TRACEBACK.replace("ValueError: loss is nan", message))
    assert [suggestion.fit for suggestion in page.suggestions] == ["fits"]
    page = page_of("Please try to raise your shared memory limit\n" + TRACEBACK)
    assert [suggestion.fit for suggestion in page.suggestions] == ["does not fit"]


# -- places


@pytest.mark.parametrize(
    ("file", "owner", "path"),
    [
        ("/home/me/envs/verl/lib/python3.10/subprocess.py", "python", "subprocess.py"),
        ("/home/me/envs/vllm/bin/torchrun", "python", "bin/torchrun"),
        ("C:\\Python311\\Lib\\subprocess.py", "python", "subprocess.py"),
        ("C:\\Users\\me\\anaconda3\\envs\\x\\lib\\asyncio\\events.py", "python", "asyncio/events.py"),
        ("D:\\code\\lib\\losses.py", "user", "D:/code/lib/losses.py"),
        ("/srv/verl/verl/trainer/main_ppo.py", "engine", "verl/trainer/main_ppo.py"),
        ("/srv/bin/train.py", "user", "/srv/bin/train.py"),
    ],
)
def test_whose_a_file_is(file: str, owner: str, path: str) -> None:
    assert (place_of(file).owner, place_of(file).path) == (owner, path)


def test_without_a_frame_of_the_users_another_library_is_named() -> None:
    site = "/usr/lib/python3.12/site-packages"
    frames = [f"{site}/transformers/models/llama/modeling_llama.py", f"{site}/torch/nn/modules/linear.py"]
    text = "Traceback (most recent call last):\n" + "".join(
        f'  File "{file}", line 9, in forward\n    x\n' for file in frames
    )
    page = page_of(text + "RuntimeError: boom\n")
    assert page.root is not None
    assert page.root.reached_from is not None
    assert page.root.reached_from.file == frames[0]
    assert "innermost frame outside torch" in to_text(page)


def test_a_rule_that_is_drawn_is_no_message() -> None:
    table = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\ntrain.py FAILED\n-----\n====="
    page = page_of(TRACEBACK.replace("ValueError: loss is nan", table))
    assert page.root is not None
    assert page.root.message == "train.py FAILED"
