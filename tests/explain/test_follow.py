"""``piecegraph explain --follow``: a job's output is passed on as it comes, and explained when it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from piecegraph.explain.follow import CHUNK_BYTES, MAX_CHUNKS, FollowedJob

FOLLOW = [sys.executable, "-m", "piecegraph", "explain", "--follow"]
TRACEBACK = b'Traceback (most recent call last):\n  File "/srv/a.py", line 3, in f\n    g()\nValueError: loss is nan\n'


def follow(data: bytes, *arguments: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*FOLLOW, *arguments], input=data, capture_output=True, check=False, **options)  # type: ignore[call-overload]


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(FOLLOW, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        yield process
        process.kill()


def test_a_line_is_there_at_once_and_the_page_at_the_end(running: subprocess.Popen[bytes]) -> None:
    for part in (b"step 1\n", b"no line end", b"\xff\xfe\x00\x1b[31m"):
        running.stdin.write(part)
        running.stdin.flush()
        assert os.read(running.stdout.fileno(), 100) == part, "while the job runs"
    running.stdin.write(b"\n" + TRACEBACK)
    out, page = running.communicate(timeout=60)
    assert out == b"\n" + TRACEBACK
    assert page.startswith(b"ValueError: 1 process failed\n")
    assert running.returncode == 0


def test_not_a_byte_is_changed() -> None:
    generator = random.Random(3)
    junk = b"".join(generator.randbytes(40) + b" text" * 40 for _ in range(3000))
    data = TRACEBACK + junk[:-1] + b"\nlast line without an end"
    done = follow(data)
    assert done.stdout == data
    assert b"ValueError: loss is nan" in done.stderr


def test_what_is_no_text_is_passed_on_all_the_same() -> None:
    data = bytes(range(256)) * 9000
    done = follow(data)
    assert done.stdout == data
    assert (done.returncode, done.stderr[:12]) == (2, b"error: PG603")


def test_json_stands_alone_on_standard_output() -> None:
    done = follow(TRACEBACK, "--json")
    assert done.stdout.startswith(b'{\n  "schema"')
    assert done.stderr == TRACEBACK


def test_a_closed_output_ends_neither_the_job_nor_the_page(tmp_path: Path) -> None:
    job = f"{sys.executable} -c \"for i in range(40000): print('line', i)\nopen('{tmp_path}/done', 'w')\n1 / 0\" 2>&1"
    command = f"{job} | {' '.join(FOLLOW)} 2>{tmp_path}/page | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("line 0\n", "")
    page = (tmp_path / "page").read_text()
    assert page.startswith("warning: not all output could be passed on: broken pipe\nZeroDivisionError: 1 process")
    assert (tmp_path / "done").exists(), "the job ran to its end"


JOB = """
import time
print("training", flush=True)
try:
    time.sleep(60)
finally:
    print("cleaning up", flush=True)
    time.sleep(0.3)
"""


def test_ctrl_c_of_the_whole_pipeline_still_gives_the_page(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    job = f"{sys.executable} {tmp_path}/job.py 2>&1 | {' '.join(FOLLOW)}"
    # In the background of a test, SIGINT may be ignored; a shell on a terminal sets it back for its jobs.
    shell = ["env", "--default-signal=INT", "bash", "-c", f"trap : INT; {job}"]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"training\n"
        os.killpg(process.pid, signal.SIGINT)
        out, page = process.communicate(timeout=30)
    assert out.startswith(b"cleaning up\nTraceback")
    assert b"KeyboardInterrupt" in page


def test_a_second_ctrl_c_ends_the_reading(running: subprocess.Popen[bytes]) -> None:
    running.stdin.write(TRACEBACK)
    running.stdin.flush()
    assert os.read(running.stdout.fileno(), 1000) == TRACEBACK
    running.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert running.poll() is None, "the job has not ended"
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=30) == 0
    assert running.stderr.read().startswith(b"ValueError: 1 process failed\n")


def test_a_signal_of_a_scheduler_leaves_time_for_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.explain.follow.GRACE_SECONDS", 0.3)
    source, job_side = os.pipe()
    job = FollowedJob(source, None)
    job.end_by(signal.SIGTERM)
    os.write(job_side, b"last words")
    assert job.read(1 << 20) == b"last words"
    os.close(job_side)


def test_a_job_that_prints_on_and_on_is_left_at_the_second_ctrl_c() -> None:
    job = FollowedJob(os.open("/dev/zero", os.O_RDONLY), None)
    assert len(job.read(1)) == CHUNK_BYTES
    job.end_by(signal.SIGINT)
    assert len(job.read(1)) == CHUNK_BYTES, "the first one is the job's"
    job.end_by(signal.SIGINT)
    assert len(job.read()) <= (MAX_CHUNKS + 1) * CHUNK_BYTES
    assert job.read() == b""


def test_a_slow_reader_does_not_fill_the_memory() -> None:
    source, job_side = os.pipe()
    target = os.open(os.devnull, os.O_WRONLY)
    job = FollowedJob(source, target)
    os.write(job_side, b"x")
    assert job.read(1) == b"x"
    os.set_blocking(job_side, False)
    written, deadline = 0, time.monotonic() + 1
    while time.monotonic() < deadline and written < 4 * MAX_CHUNKS * CHUNK_BYTES:
        try:
            written += os.write(job_side, bytes(CHUNK_BYTES))
        except BlockingIOError:
            time.sleep(0.01)
    assert written <= (MAX_CHUNKS + 3) * CHUNK_BYTES, "the pipe, the queue and one in between"
    os.close(job_side)
    assert len(job.read()) == written


@pytest.mark.parametrize("arguments", [("run.log",), ()])
def test_it_reads_a_pipe_and_no_file(arguments: tuple[str, ...]) -> None:
    command = [*FOLLOW, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert ("--follow reads standard input" if arguments else "PG602") in done.stderr
