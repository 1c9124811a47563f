"""What pytest reports, by really failing, in each of its forms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.explain.log.pytest_report import read_section
from tests.explain.log.test_dialects import places
from tests.explain.log.test_lines import prefixed, scan

TESTS = """\
import subprocess
import sys

import pytest


def inner(n):
    try:
        return {}["a"]
    except KeyError as error:
        raise ValueError("no a") from error


@pytest.fixture
def broken():
    raise RuntimeError("no fixture")


class TestMany:
    @pytest.mark.parametrize("n", [1])
    def test_chain(self, n):
        inner(n)


def test_broken(broken):
    pass


def test_lines():
    raise RuntimeError("first\\n  second")


def test_equal():
    assert [1, 2] == [1, 3]


def test_process():
    code = subprocess.run([sys.executable, "-c", "import json; json.loads('{')"]).returncode
    assert code == 0, "it failed"
"""
EXPECTED = [
    [("RuntimeError", "no fixture", [("broken", 16)])],
    [
        ("KeyError", "'a'", [("inner", 9)]),
        ("ValueError", "no a", [("test_chain", 22), ("inner", 11)]),
    ],
    [("RuntimeError", "first", [("test_lines", 30)])],
    [("AssertionError", "assert [1, 2] == [1, 3]", [("test_equal", 34)])],
    [("AssertionError", "it failed", [("test_process", 39)])],
]


def report_of(folder: Path, *arguments: str, text: str = TESTS) -> str:
    (folder / "test_it.py").write_text(text)
    quiet = ("-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--rootdir", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *quiet, *arguments, "test_it.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (1, 2), done.stderr
    return done.stdout


def told(text: str) -> list[list[tuple[str, str, list[tuple[str, int]]]]]:
    return [
        [
            (one.type.rpartition(".")[2], one.message.partition("\n")[0], [(f, n) for _, n, f in frames])
            for one, frames in zip(failure.chain, places(failure), strict=True)
        ]
        for failure in scan(text).failures
    ]


@pytest.mark.parametrize("form", ["long", "short"])
def test_each_failure_is_read(tmp_path: Path, form: str) -> None:
    text = report_of(tmp_path, f"--tb={form}")
    found = told(text)
    assert [chain for chain in found if chain[0][0] != "JSONDecodeError"] == EXPECTED
    assert len(found) == len(EXPECTED) + 1, "what a test printed is read, too"
    assert told(prefixed("[rank0]: ", text)) == found


def test_its_sources_and_its_lines_stay(tmp_path: Path) -> None:
    text = report_of(tmp_path, "-k", "chain or lines")
    chained, lines = scan(text).failures
    assert [frame.source for frame in chained.chain[1].frames] == ["inner(n)", 'raise ValueError("no a") from error']
    assert lines.chain[0].message == "first\n  second"
    assert text.splitlines()[(lines.line or 0) - 1].startswith("test_it.py:30")


def test_tracebacks_of_python_stay(tmp_path: Path) -> None:
    (failure,) = scan(report_of(tmp_path, "--tb=native", "-k", "equal")).failures
    assert failure.chain[0].message.startswith("assert [1, 2] == [1, 3]")
    assert [frame.function for frame in failure.chain[0].frames][-1] == "test_equal"


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    (chain,) = told(report_of(tmp_path, text="import no_such_module\n"))
    (((name, message, frames)),) = chain
    assert (name, message) == ("ModuleNotFoundError", "No module named 'no_such_module'")
    assert frames[-1] == ("<module>", 1)


def test_a_report_that_is_cut_off() -> None:
    assert list(read_section([])) == []
    text = "=== FAILURES ===\n___ test_it ___\n\n    def test_it():\n>       run()\n\ntest_it.py:3: \n"
    assert scan(text).failures == ()
    assert scan(text + "E   ValueError: x\n").failures[0].chain[0].type == "ValueError"
