"""What ``piecegraph doctor`` prints. ``UPDATE_GOLDEN=1 make test`` writes the tables anew; read the diff."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from piecegraph.base.text import to_json
from piecegraph.cli.doctor import doctor
from piecegraph.doctor import read
from piecegraph.doctor.checks import CHECKS, examine
from piecegraph.doctor.machine import Machine
from piecegraph.doctor.page import as_document, as_table
from tests.cases.machines import BROKEN, CPU, H200

FOLDER = Path(__file__).parents[1] / "golden"


def printed(machine: Machine, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(as_table(machine, examine(machine)))
    return re.sub(r" +$", "", out.getvalue(), flags=re.MULTILINE)


@pytest.mark.parametrize(("name", "machine"), [("doctor_h200", H200), ("doctor_cpu", CPU), ("doctor_broken", BROKEN)])
def test_table(name: str, machine: Machine) -> None:
    text, path = printed(machine), FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert max(map(len, text.splitlines())) <= 80


def test_nothing_is_cut_off_on_a_narrow_terminal() -> None:
    narrow = "".join(printed(BROKEN, 60).split())
    for finding in examine(BROKEN):
        if finding.state in ("warn", "broken"):
            assert "".join(finding.mend.split()) in narrow


def test_brackets_in_what_was_seen_are_kept() -> None:
    assert "[Errno 2]" in printed(BROKEN)


@pytest.mark.parametrize(("machine", "code"), [(H200, 0), (CPU, 0), (BROKEN, 1)])
def test_exit_code_and_document(machine: Machine, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "read_machine", lambda **_: machine)
    done = CliRunner().invoke(doctor, ["--json"])
    assert done.exit_code == code
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert [row["name"] for row in document["findings"]] == [finding.name for finding in examine(machine)]
    assert sum(document["counts"].values()) == len(CHECKS)
    assert document["machine"]["python"] == machine.python
    assert document == json.loads(json.dumps(as_document(machine, examine(machine)))), "the same without msgspec"
    assert json.loads(to_json(document)) == document
    table = CliRunner().invoke(doctor)
    assert table.exit_code == code
    assert f"{document['counts']['broken']} broken, " in table.stdout


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from piecegraph.cli.main import main; main()", "doctor", *arguments]
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=kept | environ, timeout=300)


def test_this_machine() -> None:
    done = run("--json")
    document = json.loads(done.stdout)
    found = {row["name"]: row for row in document["findings"]}
    assert done.returncode == (1 if document["counts"]["broken"] else 0), done.stderr
    assert found["torch"]["state"] == "ok"
    assert document["machine"]["torch"]["version"] in found["torch"]["evidence"]
    assert done.stderr == ""


@pytest.fixture
def crashing(tmp_path: Path) -> str:
    """A ``PYTHONPATH`` with a torch whose import ends the process."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os.abort()")
    return os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])


def test_a_pipe_gets_plain_text_and_no_color_is_respected(crashing: str) -> None:
    color = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
    assert "\x1b" not in run(PYTHONPATH=crashing).stdout
    assert color.search(run(PYTHONPATH=crashing, FORCE_COLOR="1", TERM="xterm").stdout)
    assert not color.search(run(PYTHONPATH=crashing, FORCE_COLOR="1", TERM="xterm", NO_COLOR="1").stdout)


def test_a_torch_whose_import_crashes_is_a_row_not_a_crash(crashing: str) -> None:
    done = run(PYTHONPATH=crashing)
    assert done.returncode == 1
    assert "import crashed: died of SIGABRT" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr
