"""The command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from piecegraph.version import VERSION


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


def test_env_is_a_table_and_json() -> None:
    table, document = run("env"), run("env", "--json")
    assert table.returncode == document.returncode == 0
    found = json.loads(document.stdout)
    assert found["piecegraph"] == VERSION
    for name, value in found.items():
        assert f"{name} " in table.stdout
        assert value in table.stdout


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
    assert (done.returncode, done.stderr) == (1, "error: PG101 it failed. hint: do better\n")
    assert "Traceback" in run("--debug", "fail", code=code).stderr
