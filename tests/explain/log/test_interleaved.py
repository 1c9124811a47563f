"""Interleaved tracebacks: woven with known truth, and really failing together."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from piecegraph.explain.evidence import Process
from piecegraph.explain.from_logs import explain_logs
from piecegraph.explain.page import Page
from piecegraph.explain.render import to_text
from tests.explain.log.test_lines import prefixed, scan

ROOT = Path(__file__).parents[3]
CAPTURE = ROOT / "tests" / "logs" / "eight_ranks_capture.log.gz"
CRASH = ROOT / "tests" / "cases" / "crash_together.py"


def source_line(text: str) -> int:
    """The line of the crashing script that holds a text."""
    (number,) = (number for number, line in enumerate(CRASH.read_text().split("\n"), 1) if text in line)
    return number


@pytest.fixture(scope="module")
def page() -> Page:
    return explain_logs([CAPTURE])


def test_the_root_cause_of_eight_interleaved_ranks(page: Page) -> None:
    root = page.root
    assert root is not None
    assert (root.type, root.message) == (
        "NotImplementedError",
        "argument of type: <class 'torch.cuda.streams.Stream'>",
    )
    assert root.frame is not None
    assert root.frame.file.endswith("torch/fx/proxy.py")
    assert root.frame.line == 403
    assert root.reached_from is not None
    assert root.reached_from.file.endswith("thunder/dynamo/splitter.py")
    assert root.reached_from.line == 273
    assert [shown.type for shown in root.shown_as] == ["torch._dynamo.exc.BackendCompilerFailed", "Exception"]
    assert root.shown_as[1].message.startswith("Capture cuda graph failed")


def test_all_eight_are_alike_and_no_rank_is_claimed(page: Page) -> None:
    (group,) = page.who.groups
    assert (group.count, group.certainty) == (8, "unwoven")
    assert group.processes == tuple(Process(f"Process-{number}") for number in range(1, 9))
    assert all(process.rank is None for process in group.processes)
    text = to_text(page)
    assert "8 tracebacks, 1 distinct: 8 of 8 identical" in text
    assert "cannot tell   which rank printed which traceback" in text
    assert {process.rank for process in page.who.seen} >= set(range(8)), "ranks that the log names elsewhere"


def test_the_whole_chain_is_recovered(page: Page) -> None:
    first, second = scan(gzip.decompress(CAPTURE.read_bytes()).decode()).failures[0].chain
    assert (len(first.frames), len(second.frames), second.link) == (37, 8, "context")
    lines = [frame.line for frame in first.frames]
    assert lines[:13] == [419, 527, 698, 687, 263, 899, 2309, 2284, 156, 2439, 147, 273, 52]
    assert lines[-12:] == [1098, 1309, 1098, 868, 1154, 457, 357, 819, 819, 1154, 457, 403]
    assert [frame.line for frame in second.frames] == [314, 108, 524, 156, 261, 404, 1917, 421]


def test_its_phases(page: Page) -> None:
    rows = {row.phase: row for row in page.phase.rows}
    assert (rows["init"].state, rows["load"].state, rows["kv cache"].state) == ("done", "done", "done")
    assert rows["kv cache"].line == 111
    assert (rows["capture"].state, rows["capture"].size, rows["capture"].line) == ("failed", "bs=1", 112)
    assert page.phase.failed == "capture"
    assert {"Dynamo", "thunder", "Inductor"} <= set(page.phase.layers)


def test_its_advice(page: Page) -> None:
    assert any("thunder" in known.id or "thunder" in known.title for known in page.known)
    fits = {suggestion.text: (suggestion.fit, suggestion.why) for suggestion in page.suggestions}
    memory = fits["set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)"]
    assert memory[0] == "does not fit"
    assert memory[1].startswith("no sign of memory shortage: 12.33 GB were free")
    assert fits["disable torch compile by not using --enable-torch-compile"][0] == "at a cost"


def test_its_artefacts_and_folded_stack(page: Page) -> None:
    (artefact,) = page.artefacts
    assert artefact.startswith("/opt/pytorch/lightning-thunder/gm/")
    assert "25 files" in artefact
    text = to_text(page)
    assert "... 24 frames in torch: compile to create_arg" in text
    assert len(text.split("\n")) < 80
    positions = [text.index(f"\n{title}\n") for title in ("ROOT CAUSE", "WHO", "PHASE", "STACK", "ADVICE", "ARTEFACTS")]
    assert positions == sorted(positions)


# -- woven with known truth


def entries(frames: list[tuple[int, str, str]], error: str) -> list[str]:
    head = ["Traceback (most recent call last):\n"]
    body = [f'  File "/srv/model.py", line {line}, in {name}\n    {source}\n' for line, name, source in frames]
    return [*head, *body, f"{error}\n"]


RECURSIVE = entries(
    [(1, "main", "model(x)"), *[(9, "forward", "x = layer(x)"), (4, "__call__", "return self.forward(x)")] * 3,
     (30, "matmul", "raise RuntimeError('bad shapes')")],
    "RuntimeError: bad shapes",
)  # fmt: skip
CHAINED = [
    *entries([(1, "main", "start()"), (2, "start", "load()"), (3, "load", "raise KeyError(name)")], "KeyError: 'w'"),
    "\nDuring handling of the above exception, another exception occurred:\n\n",
    *entries([(1, "main", "start()"), (5, "start", "raise RuntimeError('no')")], "RuntimeError: no weights"),
]


def weave(tracebacks: list[list[str]], stay: float, seed: int) -> str:
    """Entries of all tracebacks in a random order; ``stay`` is how likely the same process goes on."""
    generator = random.Random(seed)
    waiting, text = [list(traceback) for traceback in tracebacks], ""
    current = waiting[0]
    while any(waiting):
        if not current or generator.random() > stay:
            current = generator.choice([traceback for traceback in waiting if traceback])
        text += current.pop(0)
    return text


@pytest.mark.parametrize("stay", [0.9, 0.5, 0.0])
@pytest.mark.parametrize("traceback", [RECURSIVE, CHAINED], ids=["recursive", "chained"])
@pytest.mark.parametrize("count", [2, 8, 64])
def test_equal_tracebacks_are_unwoven_exactly(traceback: list[str], count: int, stay: float) -> None:
    (failure,) = scan(weave([traceback] * count, stay, seed=count)).failures
    assert failure.count == count
    found = [frame.line for raised in failure.chain for frame in raised.frames]
    truth = [int(entry.split("line ")[1].split(",")[0]) for entry in traceback if "File" in entry]
    assert found == truth
    assert len(failure.chain) == sum(entry.startswith("Traceback") for entry in traceback)


@pytest.mark.parametrize("seed", range(5))
def test_of_different_tracebacks_exceptions_and_innermost_frames_are_counted(seed: int) -> None:
    evidence = scan(weave([RECURSIVE] * 3 + [CHAINED] * 5, 0.7, seed))
    found = Counter({(f.chain[-1].message, f.chain[-1].frames[-1].line): f.count for f in evidence.failures})
    assert found == {("bad shapes", 30): 3, ("no weights", 5): 5}
    assert {failure.certainty for failure in evidence.failures} == {"reconstructed"}
    assert evidence.tree
    assert all(not failure.processes for failure in evidence.failures)


def test_many_different_tracebacks_are_counted_without_a_search() -> None:
    evidence = scan(weave([RECURSIVE] * 60 + [CHAINED[:5]] * 40, 0.3, seed=1))
    found = Counter({(f.chain[-1].message, f.chain[-1].frames[-1].line): f.count for f in evidence.failures})
    assert found == {("bad shapes", 30): 60, ("'w'", 3): 40}
    assert not evidence.tree


def test_a_rank_that_pauses_while_others_print_is_not_cut_in_two() -> None:
    head, rest = prefixed("[rank0]: ").split("\n", 1)
    others = "\n".join(prefixed(f"[rank{rank}]: ") for rank in range(1, 60))
    (failure,) = scan(f"{head}\n{others}\n{rest}").failures
    assert failure.count == 60


@pytest.mark.parametrize("count", [256, 1024])
def test_hundreds_of_ranks_that_take_turns_line_by_line(count: int) -> None:
    lines = prefixed("").split("\n")
    (failure,) = scan("\n".join(f"[rank{rank}]: {line}" for line in lines for rank in range(count))).failures
    assert (failure.count, failure.certainty, len(failure.processes)) == (count, "printed", count)


def test_tracebacks_that_follow_each_other_are_simply_read() -> None:
    evidence = scan("".join(RECURSIVE + CHAINED))
    assert [failure.certainty for failure in evidence.failures] == ["printed", "printed"]
    assert not evidence.tree


def test_a_chain_that_goes_on_behind_another_process_is_given_back_to_its_own() -> None:
    first, rest = CHAINED[:5], CHAINED[5:]
    (failure,) = scan("".join([*first, *first, *rest, *rest])).failures
    assert (failure.count, len(failure.chain)) == (2, 2)


# -- really failing together


def crash(kind: str, way: str, prefix: str, folder: Path, **environment: str) -> Page:
    log = folder / "run.log"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | environment
    with log.open("wb") as file:
        reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)  # one pipe, as a launcher has it
        assert reader.stdin is not None
        command = [sys.executable, str(CRASH), kind, way, prefix]
        subprocess.run(command, stdout=reader.stdin, stderr=reader.stdin, env=variables, timeout=60, check=False)
        reader.stdin.close()
        reader.wait(timeout=60)
    return explain_logs([log])


def crash_until(
    is_complete: Callable[[Page], bool], kind: str, way: str, prefix: str, folder: Path, **environment: str
) -> Page:
    """Fail again, at most five times, until all is found. Processes weave as the machine lets them, and tear what
    Python prints line by line: what a log does not hold, no reader can tell. Three times in a row it was seen once.
    """
    for _ in range(6):
        page = crash(kind, way, prefix, folder, **environment)
        if is_complete(page):
            return page
    pytest.fail(to_text(page))


def counted(page: Page) -> set[tuple[int, str]]:
    return {(group.count, group.type) for group in page.who.groups}


@pytest.mark.parametrize("prefix", ["none", "rank", "worker"])
@pytest.mark.parametrize("way", ["uncaught", "caught"])
def test_eight_processes_fail_in_the_compiler(way: str, prefix: str, tmp_path: Path) -> None:
    page = crash_until(lambda page: counted(page) == {(8, "NotImplementedError")}, "compile", way, prefix, tmp_path)
    (group,) = page.who.groups
    assert (group.count, group.type, group.message) == (8, "NotImplementedError", "argument of type: <class 'int'>")
    assert page.root is not None
    assert page.root.frame is not None
    assert page.root.frame.line == source_line('raise NotImplementedError(f"argument of type')
    assert [shown.type for shown in page.root.shown_as] == ["BackendCompilerFailed", "Exception"]
    functions = [line.frame.function for line in page.stack[0].lines if line.frame is not None]
    assert functions == [
        "fail_compile", "capture_one_batch_size", "call_backend", "call_backend", "inductor", "trace",
        "create_arg", "<genexpr>", "create_arg", "<genexpr>", "create_arg",
    ]  # fmt: skip
    ranks = {process.rank for process in group.processes}
    assert ranks == (set(range(8)) if prefix == "rank" else {None} if group.processes else set())
    assert page.suggestions[0].why.startswith("no sign of memory shortage")


@pytest.mark.parametrize("prefix", ["none", "rank"])
@pytest.mark.parametrize("way", ["uncaught", "caught"])
def test_one_runs_out_of_memory_and_seven_echo(way: str, prefix: str, tmp_path: Path) -> None:
    expected = {(1, "OutOfMemoryError"), (7, "RuntimeError")}
    page = crash_until(lambda page: counted(page) == expected, "oom", way, prefix, tmp_path)
    root, echo = page.who.groups
    assert (root.role, root.count, root.type) == ("root", 1, "OutOfMemoryError")
    assert (echo.role, echo.count, echo.type) == ("echo", 7, "RuntimeError")
    assert page.root is not None
    assert page.root.frame is not None
    assert page.root.frame.function == "allocate"
    if prefix == "rank":
        assert [process.rank for process in root.processes] == [3]


@pytest.mark.parametrize("prefix", ["none", "rank"])
@pytest.mark.parametrize("way", ["uncaught", "caught"])
def test_four_fail_in_one_way_and_four_in_another(way: str, prefix: str, tmp_path: Path) -> None:
    expected = {(4, "NotImplementedError"), (4, "RuntimeError")}
    page = crash_until(lambda page: counted(page) == expected, "mixed", way, prefix, tmp_path)
    assert page.root is not None
    assert page.root.frame is not None
    assert page.root.frame.function in ("create_arg", "matmul")
    if prefix == "rank":
        ranks = {group.type: {process.rank for process in group.processes} for group in page.who.groups}
        assert ranks == {"NotImplementedError": {1, 3, 5, 7}, "RuntimeError": {0, 2, 4, 6}}
    else:
        assert all(not group.processes or group.certainty == "printed" for group in page.who.groups)


def test_unbuffered_output_tears_lines_and_the_cause_is_found_all_the_same(tmp_path: Path) -> None:
    page = crash_until(
        lambda page: page.root is not None and page.who.groups[0].count >= 4,
        *("compile", "uncaught", "none"),
        tmp_path,
        PYTHONUNBUFFERED="1",
    )
    assert page.root is not None
    assert page.root.type in ("NotImplementedError", "BackendCompilerFailed")
