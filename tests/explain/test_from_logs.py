"""Inputs and the command: files, gzip, standard input, encodings, sizes, formats and exit codes."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph.errors import InputError, PiecegraphError
from piecegraph.explain.as_json import to_dict
from piecegraph.explain.from_logs import explain_logs
from piecegraph.explain.log import collected, scan, source, tail
from piecegraph.explain.render import to_markdown, to_text
from piecegraph.explain.report_page import to_html
from tests.cli.test_cli import run
from tests.explain.log.test_interleaved import CAPTURE
from tests.explain.log.test_lines import FATAL, OTHER, PREFIXES, TRACEBACK
from tests.explain.test_page import CALL_CHAIN, GROUP, RAY, TABLE


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text(TRACEBACK + "\n")
    return path


# -- the command


def test_explain_prints_a_page(log: Path) -> None:
    done = run("explain", str(log))
    assert (done.returncode, done.stderr) == (0, "")
    assert "ROOT CAUSE\n  ValueError: loss is nan\n" in done.stdout
    assert "\x1b" not in done.stdout


def test_json_is_one_document(log: Path) -> None:
    done = run("explain", str(log), "--json")
    assert json.loads(done.stdout)["root"]["message"] == "loss is nan"


@pytest.mark.parametrize(
    ("suffix", "start"), [(".html", "<!DOCTYPE html>"), (".md", "# ValueError"), (".json", "{"), (".txt", "ValueError")]
)
def test_a_page_is_written_in_the_format_of_its_suffix(suffix: str, start: str, log: Path) -> None:
    page = log.with_name(f"page{suffix}")
    done = run("explain", str(log), "-o", str(page))
    assert (done.returncode, done.stdout) == (0, "")
    assert page.read_text().startswith(start)


def test_an_unknown_suffix_is_a_usage_error(log: Path) -> None:
    assert run("explain", str(log), "-o", "page.pdf").returncode == 2


def test_a_page_that_cannot_be_written(log: Path) -> None:
    done = run("explain", str(log), "-o", str(log.parent / "no" / "page.md"))
    assert done.returncode == 2
    assert "PG601" in done.stderr


def test_standard_input_and_gzip() -> None:
    command = [sys.executable, "-c", "from piecegraph.cli.main import main; main()", "explain"]
    for arguments, text in (([], TRACEBACK.encode()), (["-"], gzip.compress(TRACEBACK.encode()))):
        done = subprocess.run([*command, *arguments], input=text, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert b"standard input: 7 lines" in done.stdout
        assert b"loss is nan" in done.stdout


def test_the_catalogue_is_listed() -> None:
    done = run("explain", "--list")
    assert done.returncode == 0
    assert "thunder" in done.stdout
    assert "rule" in done.stdout


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "PG602"),
        (b"\x7fELF" + bytes(range(256)) * 20, "PG603"),
        (random.Random(0).randbytes(5000), "PG603"),
        (b"\x1f\x8b" + b"no gzip at all", "PG601"),
        (None, "PG601"),
    ],
    ids=["empty", "binary", "compressed", "broken gzip", "missing"],
)
def test_unusable_input_is_a_clear_error(content: bytes | None, code: str, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    if content is not None:
        path.write_bytes(content)
    done = run("explain", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {code} ")
    assert "run.log" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "hint: " in done.stderr


@pytest.mark.parametrize("place", [0, 30, 200_000])
def test_zeros_that_a_file_system_left_are_read_past(place: int, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    before = b"step 1 of 3000\n" * (place // 15)
    path.write_bytes(before + bytes(5000) + TRACEBACK.encode() + b"\n")
    page = explain_logs([path])
    assert page.root is not None
    assert page.root.message == "loss is nan"
    assert page.who.groups[0].line == place // 15 + TRACEBACK.count("\n") + 1


def test_a_database_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "profile.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE kernels (name TEXT)")
    with pytest.raises(InputError, match="PG603"):
        explain_logs([path])


def test_a_folder_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="PG601.*cannot be read"):
        explain_logs([tmp_path])


def test_python_entry_is_quick_and_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_logs([CAPTURE]).who.num_tracebacks == 8
    assert capsys.readouterr() == ("", "")


def test_a_bar_is_shown_for_a_long_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.log"
    path.write_text(TRACEBACK + "\n" + "tick\n" * 700_000)
    explain_logs([path], progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "explain" in err
    assert "3/3" in err


# -- several logs


def test_one_log_for_each_process(tmp_path: Path) -> None:
    for rank, text in enumerate(["", TRACEBACK, TRACEBACK, OTHER]):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "stderr.log").write_text(text)
    page = explain_logs([tmp_path / str(rank) / "stderr.log" for rank in range(4)])
    groups = {group.type: [process.label for process in group.processes] for group in page.who.groups}
    assert groups == {"ValueError": ["1/stderr.log", "2/stderr.log"], "KeyError": ["3/stderr.log"]}
    text = to_text(page)
    assert "stderr.log is empty" in text
    assert "which failed first: the logs are of different processes" in text


# -- encodings


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(TRACEBACK.replace("nan", "n\u00e4n \u7ebf").encode(encoding))
    assert explain_logs([path]).root.message == "loss is n\u00e4n \u7ebf"  # type: ignore[union-attr]


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(TRACEBACK.encode().replace(b"nan", b"\xff\xfe"))
    assert explain_logs([path]).root.message == "loss is \ufffd\ufffd"  # type: ignore[union-attr]


def test_a_gzip_that_ends_early_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "run.log.gz"
    noise = "".join(random.Random(0).choices("abcdefgh \n", k=200_000))
    path.write_bytes(gzip.compress((TRACEBACK + "\n" + noise).encode())[:-5000])
    page = explain_logs([path])
    assert page.root is not None
    assert "ends early" in to_text(page)


# -- long logs take bounded time and memory


def test_a_file_without_line_ends_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(source, "MAX_LINE", 500)
    path = tmp_path / "run.log"
    path.write_text("x" * 20_000 + "\n" + TRACEBACK)
    kept = [len(line) for block in source.Log(str(path)).blocks() for line in block]
    assert max(kept) <= 500
    page = explain_logs([path])
    assert page.root is not None
    assert "were cut" in to_text(page)


def test_blocks_do_not_change_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.log"
    path.write_text(f"{TRACEBACK}\n{OTHER}\n")
    whole = explain_logs([path])
    for size in (1, 7, 64):
        monkeypatch.setattr(source, "BLOCK_BYTES", size)
        assert explain_logs([path]) == whole


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_STREAM_LINES", 40)
    monkeypatch.setattr(scan, "MAX_READ_PARTS", 170)
    monkeypatch.setattr(tail, "TAIL_LINES", 30)
    monkeypatch.setattr(source, "BLOCK_BYTES", 512)


@pytest.mark.usefixtures("small_bounds")
def test_more_tracebacks_than_are_read_are_counted_and_the_last_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("\n".join([*[TRACEBACK] * 200, OTHER, ""]))
    page = explain_logs([path])
    read = {group.type: group.count for group in page.who.groups}
    assert set(read) == {"ValueError", "KeyError"}, "the last failure is not lost"
    (note,) = page.notes
    counted = int(note.split(" further")[0].rsplit(" ", 1)[1].replace(",", ""))
    assert read["ValueError"] + counted == 200
    assert 170 / 3 - 1 <= read["ValueError"] < 100


def test_a_frame_outside_of_any_function_behind_lines_that_were_all_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = '  File "/srv/app/train.py", line 1\n    def\n       ^\nSyntaxError: invalid syntax\n'
    path = tmp_path / "run.log"
    path.write_text(f"{TRACEBACK}\n{frame}")
    with_room = explain_logs([path]).who.groups
    monkeypatch.setattr(scan, "MAX_STREAM_LINES", len(TRACEBACK.splitlines()))
    assert explain_logs([path]).who.groups == with_room
    assert "SyntaxError" in {group.type for group in with_room}


def test_more_distinct_failures_than_are_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "MAX_DISTINCT_FAILURES", 3)
    path = tmp_path / "run.log"
    path.write_text("\n".join(TRACEBACK.replace("line 30", f"line {number}") for number in range(100, 110)))
    page = explain_logs([path])
    assert len(page.who.groups) == 3
    assert "7 further tracebacks were counted and not kept" in page.notes[0]


# -- anything at all


FRAGMENTS = [line for text in (TRACEBACK, OTHER, TABLE, FATAL, GROUP, RAY, CALL_CHAIN) for line in text.split("\n")] + [
    "",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
    "Process Process-4:",
    "Capturing batches (bs=1 avail_mem=12.33 GB):   0%|          | 0/1",
    "Possible solutions:",
    "1. set --mem-fraction-static lower",
    "[2025-10-21 19:07:30 TP0] Init torch distributed begin.",
    "Exception in thread Thread-1:",
    "saved to /tmp/x",
    "\x1b[31m",
    "terminate called after throwing an instance of 'c10::Error'",
    "  what():  no",
]
LINES = st.one_of(
    st.sampled_from(FRAGMENTS),
    st.builds(
        lambda prefix, text: prefix[0] + text, st.sampled_from(list(PREFIXES.values())), st.sampled_from(FRAGMENTS)
    ),
    st.builds(lambda text, at: text[:at], st.sampled_from(FRAGMENTS), st.integers(0, 40)),
    st.text(max_size=30),
)


def explain_bytes(content: bytes, folder: Path) -> None:
    """A page in every format, or an error of ours."""
    path = folder / "fuzz.log"
    path.write_bytes(content)
    try:
        page = explain_logs([path], progress=False)
    except PiecegraphError:
        return
    json.dumps(to_dict(page))
    assert "ROOT CAUSE" in to_text(page)
    assert to_html(page)
    assert to_markdown(page)


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(LINES, max_size=40),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    encoding=st.sampled_from(["utf-8", "utf-16", "utf-8-sig", "utf-32"]),
    cut=st.integers(0, 200),
)
def test_any_mix_of_lines_ends_in_a_page_or_an_error(
    lines: list[str], end: str, encoding: str, cut: int, tmp_path: Path
) -> None:
    content = end.join(lines).encode(encoding, "replace")
    explain_bytes(content[: max(0, len(content) - cut)] if cut % 2 else content, tmp_path)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=400), is_packed=st.booleans())
def test_any_bytes_end_in_a_page_or_an_error(content: bytes, is_packed: bool, tmp_path: Path) -> None:
    explain_bytes(gzip.compress(content) if is_packed else content, tmp_path)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), keep=st.floats(0.3, 1.0))
def test_a_real_log_with_lines_lost_and_moved_ends_in_a_page(seed: int, keep: float, tmp_path: Path) -> None:
    generator = random.Random(seed)
    lines = gzip.decompress(CAPTURE.read_bytes()).split(b"\n")[130:600]
    lines = [line for line in lines if generator.random() < keep]
    for _ in range(10):
        place = generator.randrange(len(lines))
        lines.insert(generator.randrange(len(lines)), lines.pop(place))
    explain_bytes(b"\n".join(lines), tmp_path)


@pytest.mark.usefixtures("small_bounds")
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, min_size=100, max_size=300))
def test_bounds_hold_whatever_the_lines_are(lines: list[str], tmp_path: Path) -> None:
    explain_bytes("\n".join(lines).encode("utf-8", "replace"), tmp_path)


# -- known issues

OURS = r"""
[[issue]]
id = "acme-nan"
title = "The loss is not a number"
exception = 'ValueError: loss is nan'
frame = '(^|/)app/train\.py:step'
meaning = "The learning rate is too high."
fix = "Lower it."
source = "seen with acme 2.3"
"""


def test_known_issues_of_ones_own(log: Path) -> None:
    issues = log.with_name("team.toml")
    issues.write_text(OURS)
    done = run("explain", str(log), "--known", str(issues))
    assert "known issue   The loss is not a number  (acme-nan)" in done.stdout
    assert "acme-nan" in run("explain", "--list", "--known", str(issues)).stdout
    assert "none of the catalogue matches" in run("explain", str(log)).stdout


def test_a_cause_that_only_a_line_of_the_log_tells(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("Out of memory: Killed process 4242 (python) total-vm:214748364kB\nbye\n")
    page = explain_logs([path])
    assert page.outcome == "failure"
    assert [known.id for known in page.known] == ["host-oom-killed", "process-killed"]
    assert "host-oom-killed" in to_text(page)


def test_a_line_is_found_behind_many_of_another_issue(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    watchdog = "[rank1]:[E626 a.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8\n"
    limit = "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-05-02T03:58:46 DUE TO TIME LIMIT ***\n"
    path.write_text(watchdog * 100 + limit)
    assert {known.id for known in explain_logs([path]).known} >= {"nccl-timeout", "scheduler-time-limit"}
