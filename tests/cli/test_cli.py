"""The command line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.base.version import VERSION
from piecegraph.cli.main import main
from piecegraph.errors import ModelError
from tests.cases.forked import ForkServer


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    what = ["-m", "piecegraph"] if code is None else ["-c", code]
    return subprocess.run([sys.executable, *what, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "env --help",
        "explain --help",
        "explain --list",
        "doctor --help",
        "generate --help",
        "run --help",
        "trace --help",
        "warm --help",
        "cache --help",
        "cache export --help",
    ],
)
def test_help_and_version_import_no_torch(arguments: str) -> None:
    code = (
        "import sys\nfrom piecegraph.cli.main import group\n"
        "try:\n    group()\nfinally:\n    assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = run(*arguments.split(), code=code)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_version() -> None:
    assert run("--version").stdout == f"piecegraph, version {VERSION}\n"


def test_env_is_a_table_and_json(forked: ForkServer) -> None:
    code = "from piecegraph.cli.main import main; main()"
    table, document = (forked.run("-c", code, "env", *how, cwd=Path()) for how in ([], ["--json"]))
    assert table.returncode == document.returncode == 0
    found = json.loads(document.stdout)
    assert found["piecegraph"] == VERSION
    for name, value in found.items():
        assert f"{name} " in table.stdout
        assert value in table.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["env"], ["explain", "--list"]])
def test_a_full_disk_is_told_in_one_line(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "piecegraph", *arguments],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: PG601 standard output cannot be written: no space left on device. hint: write to another place\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generate m", "Standard input is closed"),
        ("generate m -", "Standard input is closed"),
        ("explain", "give the path of a log, or pipe one in"),
        ("explain -", "PG601 standard input cannot be read: it is closed"),
    ],
)
def test_a_closed_standard_input_is_told(arguments: str, said: str) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m piecegraph {arguments} <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_command_is_a_usage_error() -> None:
    done = run("frobnicate")
    assert done.returncode == 2
    assert "No such command" in done.stderr


def test_our_own_errors_are_one_line_unless_debugging() -> None:
    code = (
        "from piecegraph.cli import main as m\nfrom piecegraph.errors import ConfigError\nimport click\n"
        "@m.group.command()\ndef fail():\n    raise ConfigError('PG101', 'it failed', hint='do better')\n"
        "m.main()"
    )
    done = run("fail", code=code)
    assert (done.returncode, done.stderr) == (2, "error: PG101 it failed. hint: do better\n")
    assert "Traceback" in run("--debug", "fail", code=code).stderr


def test_an_error_is_told_with_its_notes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = ModelError("PG661", "there is no model")
    error.add_note("what was dumped of it:\n  /tmp/look/index.md")

    def fails() -> None:
        raise error

    monkeypatch.setattr("piecegraph.cli.main.group", fails)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.endswith("there is no model\nwhat was dumped of it:\n  /tmp/look/index.md\n")


@pytest.mark.parametrize("command", ["env", "explain --list"])
def test_a_reader_that_stops_early_is_no_failure(command: str) -> None:
    shell = f"set -o pipefail; {sys.executable} -m piecegraph {command} | (exec < /dev/null; sleep 1)"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["doctor", "explain {log}"])
def test_a_terminal_that_knows_ascii_alone(command: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text('Traceback (most recent call last):\n  File "/srv/\u00e4.py", line 3, in f\nValueError: n\u00f6\n')
    done = subprocess.run(
        [sys.executable, "-m", "piecegraph", *command.format(log=log).split()],
        env={**os.environ, "COLUMNS": "10", "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1)
    assert "UnicodeEncodeError" not in done.stderr
    assert "check" in done.stdout or "ValueError: n?" in done.stdout
