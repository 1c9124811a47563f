"""Every prefix that a launcher or logger puts in front of a line: the same failure, and who failed if it is proven."""

from __future__ import annotations

import json
import time

import pytest

from piecegraph.explain.evidence import Evidence, Failure, Process
from piecegraph.explain.log.scan import Scanner

TRACEBACK = """\
Traceback (most recent call last):
  File "/srv/app/train.py", line 12, in main
    step(batch)
    ^^^^^^^^^^^
  File "/srv/app/train.py", line 30, in step
    raise ValueError("loss is nan")
ValueError: loss is nan"""
OTHER = TRACEBACK.replace("line 30", "line 31").replace("ValueError", "KeyError")


def scan(text: str) -> Evidence:
    scanner = Scanner()
    scanner.begin_log("run.log", "")
    scanner.feed(text.split("\n"))
    (evidence,) = scanner.finish()
    return evidence


def prefixed(prefix: str, text: str = TRACEBACK) -> str:
    return "\n".join(prefix + line for line in text.split("\n"))


def shape(failure: Failure) -> tuple[str, str, list[tuple[int, str, str]]]:
    (raised,) = failure.chain
    return raised.type, raised.message, [(frame.line, frame.function, frame.source) for frame in raised.frames]


WHOLE = ("ValueError", "loss is nan", [(12, "main", "step(batch)"), (30, "step", 'raise ValueError("loss is nan")')])
PREFIXES = {
    "torch excepthook": ("[rank3]: ", Process("rank3", rank=3)),
    "vLLM worker": ("(Worker_TP0 pid=7161) ", Process("Worker_TP0", pid=7161)),
    "vLLM worker and logger": (
        "(EngineCore_0 pid=9) ERROR 05-08 19:06:38 [core.py:962] ",
        Process("EngineCore_0", pid=9),
    ),
    "vLLM logger": ("ERROR 05-08 19:06:38 [multiproc_executor.py:962] ", None),
    "torchelastic": ("[default0]:", Process("default0")),
    "torchelastic and rank": ("[default2]:[rank2]: ", Process("default2 rank2", rank=2)),
    "srun": ("3: ", Process("task 3")),
    "srun, padded": ("  3: ", Process("task 3")),
    "mpirun": ("[1,5]<stderr>:", Process("MPI rank 5", rank=5)),
    "mpirun 5": ("[prterun-node1-77@1,5]<stderr>: ", Process("MPI rank 5", rank=5)),
    "MPICH": ("[5] ", Process("rank5", rank=5)),
    "torchrun without a role": ("[5]:", Process("rank5", rank=5)),
    "torchx": ("trainer/0 ", Process("trainer/0")),
    "torchx and torchrun": ("trainer/0 [5]:", Process("trainer/0 rank5", rank=5)),
    "docker compose": ("worker-1  | ", Process("worker-1")),
    "docker timestamps": ("2025-10-21T19:07:30.123456789Z ", None),
    "Kubernetes": ("2025-10-21T19:07:30.123456789Z stderr F ", None),
    "kubectl": ("[pod/llm-0/server] ", Process("llm-0/server")),
    "Ray": ("(RayWorker pid=88, ip=10.0.0.7) ", Process("RayWorker", pid=88, host="10.0.0.7")),
    "Ray without a name": ("(pid=88) ", Process("pid 88", pid=88)),
    "torch logging": ("E1021 19:07:57.030000 1234 torch/_dynamo/guards.py:99] [0/0] ", None),
    "logging": ("2025-10-21 19:07:30,123 - app.main - ERROR - ", None),
    "logging.basicConfig": ("ERROR:app.main:", None),
    "colours": ("\x1b[31m", None),
    "none": ("", None),
}


@pytest.mark.parametrize(("prefix", "process"), PREFIXES.values(), ids=PREFIXES.keys())
def test_a_traceback_behind_a_prefix(prefix: str, process: Process | None) -> None:
    text = f"{prefixed(prefix)}\n{prefix}goodbye"
    (failure,) = scan(text).failures
    assert shape(failure)[0] == "ValueError"
    assert shape(failure)[1].startswith("loss is nan")
    assert shape(failure)[2] == WHOLE[2]
    assert failure.processes == ((process,) if process else ())
    assert failure.certainty == "printed"


@pytest.mark.parametrize("prefix", ["[rank{}]: ", "(Worker_TP{} pid=1{}) ", "[default{}]:", "{}: ", "[1,{}]<stderr>:"])
def test_interleaved_lines_are_told_apart_by_their_prefix(prefix: str) -> None:
    texts = [prefixed(prefix.replace("{}", str(rank)), text) for rank, text in enumerate((TRACEBACK, OTHER))]
    both = [line for pair in zip(*(text.split("\n") for text in texts), strict=True) for line in pair]
    first, second = scan("\n".join(both)).failures
    assert shape(first) == WHOLE
    assert shape(second)[0] == "KeyError"
    assert [process.label[-1] for failure in (first, second) for process in failure.processes] == ["0", "1"]


def test_a_number_in_front_of_a_colon_is_no_task_without_a_traceback_behind_it() -> None:
    text = "1: first, choose a model\n2: then, load it\n" + TRACEBACK
    (failure,) = scan(text).failures
    assert failure.processes == ()


def test_a_worker_named_in_the_header_is_believed_if_nothing_stands_between() -> None:
    head = "[2025-10-21 19:07:51 TP3] Scheduler hit an exception: "
    (failure,) = scan(head + TRACEBACK).failures
    assert failure.processes == (Process("TP3"),)
    broken = (head + TRACEBACK).replace("\n  File", "\n[2025-10-21 19:07:51 TP1] hello\n" * 6 + "  File", 1)
    (failure,) = scan(broken).failures
    assert failure.processes == ()


def test_a_log_line_ends_the_text_of_an_exception() -> None:
    (failure,) = scan(
        TRACEBACK + "\n[2025-10-21 19:07:51 TP1] still here\nINFO 05-08 19:06:38 [a.py:1] so am I"
    ).failures
    assert shape(failure) == WHOLE


def test_carriage_returns() -> None:
    bars = "".join(f"\rLoading: {n}%|#   | {n}/100" for n in range(0, 100, 7))
    (failure,) = scan(f"{bars}\r{TRACEBACK}".replace("\n", "\r\n")).failures
    assert shape(failure) == WHOLE


def test_colours_inside_a_line() -> None:
    coloured = TRACEBACK.replace('"/srv/app/train.py"', '\x1b[35m"/srv/app/train.py"\x1b[0m').replace(
        "ValueError:", "\x1b[1;35mValueError\x1b[0m:"
    )
    (failure,) = scan(coloured).failures
    assert shape(failure)[2][0][:2] == (12, "main")
    assert failure.chain[0].type == "ValueError"


@pytest.mark.parametrize(
    ("whole", "torn"),
    [
        ('train.py", line 12, in main\n', 'train.py", line\n other words\n 12, in main\n'),
        ('train.py", line 12, in main\n', 'train.py",\n line 12, in main\n'),
        ("Traceback (most recent call last):\n", "Traceback (most rec\nent call last):\n"),
        ('\n  File "/srv/app/train.py", line 12', '  File "/srv/app/train.py", line 12'),
    ],
    ids=["frame", "frame at a space", "header", "header and frame in one line"],
)
def test_torn_and_glued_lines(whole: str, torn: str) -> None:
    assert whole in TRACEBACK
    (failure,) = scan(TRACEBACK.replace(whole, torn)).failures
    assert [frame[:2] for frame in shape(failure)[2]] == [(12, "main"), (30, "step")]


def test_two_exceptions_written_piece_by_piece_over_each_other() -> None:
    lines = [line for line in TRACEBACK.split("\n")[:-1] for _ in range(2)]
    text = "\n".join([*lines, "ValueErrorValueError: : loss is nanloss is nan"])
    (failure,) = scan(text).failures
    assert (failure.count, failure.certainty, shape(failure)[:2]) == (2, "unwoven", ("ValueError", "loss is nan"))


FATAL = """\
Fatal Python error: Segmentation fault

Thread 0x00007f5 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f6 (most recent call first):
  File "/srv/app/kernel.py", line 7 in launch
  File "/srv/app/main.py", line 3 in <module>

Extension modules: numpy (total: 1)"""


def test_a_fatal_signal_with_the_most_recent_call_first() -> None:
    (failure,) = scan(prefixed("[rank1]: ", FATAL)).failures
    assert failure.kind == "signal"
    assert (failure.chain[0].type, failure.chain[0].message) == ("Fatal Python error", "Segmentation fault")
    assert [frame.function for frame in failure.chain[0].frames] == ["<module>", "launch"]
    assert failure.processes == (Process("rank1", rank=1),)


def test_a_dump_of_threads_that_go_on_is_no_failure() -> None:
    evidence = scan(FATAL.partition("\n\n")[2].replace("Current thread", "Thread"))
    assert (evidence.failures, evidence.num_call_chains) == ((), 2)


def test_a_cpp_exception() -> None:
    text = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [Rank 2] Watchdog caught it"
    )
    (failure,) = scan(text).failures
    assert (failure.chain[0].type, failure.chain[0].message) == ("c10::DistBackendError", "[Rank 2] Watchdog caught it")


@pytest.mark.parametrize("key", ["log", "message", "msg"])
def test_lines_that_a_collector_wrapped_into_records(key: str) -> None:
    def record(line: str) -> str:
        return json.dumps({key: line + "\n", "stream": "stderr", "time": "2026-11-18T03:47:29.1Z"})

    (failure,) = scan("\n".join(map(record, TRACEBACK.split("\n")))).failures
    assert shape(failure) == WHOLE


def test_records_that_name_a_rank() -> None:
    lines = [json.dumps({"rank": rank, "message": line}) for line in TRACEBACK.split("\n") for rank in range(3)]
    (failure,) = scan("\n".join(lines)).failures
    assert shape(failure) == WHOLE
    assert [process.rank for process in failure.processes] == [0, 1, 2]


@pytest.mark.parametrize(
    "piece",
    ["a.cu:1: x Assertion `x ", "a:1", "_llama", "error: ", "killed by ", "exit with exit code ", "<1:1, ", "'x\\n"],
)
def test_a_long_line_that_nearly_says_something_takes_no_long_time(piece: str) -> None:
    line = piece * (60_000 // len(piece))
    begun = time.perf_counter()
    scan(f"{line}\n{line} (most recent call last):\\n{line}\nAssertion `{line} Killed ERROR")
    assert time.perf_counter() - begun < 5, "a quadratic pattern takes minutes"
