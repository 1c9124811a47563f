"""``piecegraph bench``: what it prints, writes and ends with."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from piecegraph.bench import run as run_module
from piecegraph.bench.result import BenchResult
from piecegraph.cli.main import group
from tests.cases.bench import made_result

ONE_SCREEN = 32


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(group, ["bench", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be measured; nothing is."""
    found: list[Any] = []

    def run(config: Any, decisions: Any, progress: Any) -> BenchResult:
        found.append(config)
        print("a library prints")
        return made_result()

    monkeypatch.setattr(run_module, "run", run)
    return found


def test_help_fits_on_a_screen_with_two_examples_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom piecegraph.cli.main import group\n"
        "try:\n    group(['bench', '--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    *lines, imported = shown.splitlines()
    assert imported == "False"
    assert len(lines) <= ONE_SCREEN
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if line.startswith("  piecegraph bench ")]) == 2


def test_settings_come_first_and_json_stands_alone(asked: list[Any], tmp_path: Path) -> None:
    done = invoke("tiny", "--batch-size", "1,8", "--modes", "full,eager", "--device", "cpu")
    assert done.stdout.startswith("model          tiny         random weights of a built-in shape\n")
    assert "not as asked" in done.stdout
    assert asked[-1].batch_sizes == (1, 8)
    assert asked[-1].modes == ("eager", "full"), "the baseline first"

    path = tmp_path / "run.json"
    done = invoke("tiny", "--json", "-o", str(path))
    assert json.loads(done.stdout) == json.loads(path.read_text())
    assert "repeats" in done.stderr


def test_strict_ends_with_3_if_anything_was_lost(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("tiny").exit_code == 0
    assert invoke("tiny", "--strict").exit_code == 3
    whole = replace(made_result(), rows=made_result().rows[:3])
    monkeypatch.setattr(run_module, "run", lambda *_: whole)
    assert invoke("tiny", "--strict").exit_code == 0


def test_only_rank_0_prints_and_writes(asked: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    done = invoke("tiny", "-o", str(tmp_path / "run.json"))
    assert (done.exit_code, done.stdout) == (0, "a library prints\n")
    assert not list(tmp_path.iterdir())
    assert asked[-1].tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "one of them"),
        (["tiny", "--module", "a:b"], "one of them"),
        (["tiny", "--batch-size", "0"], "no list of positive integers"),
        (["tiny", "--input-len", ""], "no list of positive integers"),
        (["--module", "a:b", "--dtype", "float16"], "--dtype needs a model"),
        (["--compare", "a", "b", "--modes", "full"], "--modes needs a model"),
        (["serve"], "Missing argument 'URL'"),
    ],
)
def test_a_wrong_call_ends_with_2(arguments: list[str], text: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert text in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["tiny", "--modes", "fast"], "PG101"),
        (["tiny", "--dtype", "bfloat17"], "PG101"),
        (["tiny", "-o", "run.txt"], "PG601"),
        (["--compare", "no.json", "no.json"], "PG601"),
    ],
)
def test_what_cannot_be_used_is_told_at_once(arguments: list[str], code: str, asked: list[Any]) -> None:
    assert code in str(invoke(*arguments).exception)
    assert not asked


def test_two_files_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(made_result().to_json())
    done = invoke("--compare", str(path), str(path))
    assert done.stdout.splitlines()[-1] == "4 no change, 2 no number"
    found = json.loads(invoke("--compare", str(path), str(path), "--json").stdout)
    assert [row["change"] for row in found["rows"]] == ["no change"] * 4 + ["no number"] * 2
