"""Folders for temporary files are gone when their process is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from piecegraph.base import scratch

MAKE = """
import os, sys
from piecegraph.base.scratch import scratch_folder
print(scratch_folder("pgscratch_"), flush=True)
sys.stdin.readline()
if sys.argv[1] == "killed":
    os._exit(1)
"""


def start(how: str, parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, how],
        env={**os.environ, "TMPDIR": str(parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_only_what_the_dead_have_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (killed, left), (ended, gone), (alive, held) = (start(how, tmp_path) for how in ("killed", "ended", "alive"))
    for process in (killed, ended):
        process.communicate("\n")
    assert not gone.exists(), "who ends as it should leaves nothing"
    assert left.is_dir()
    (left / "file").write_text("")
    foreign = tmp_path / "pgother_1"
    foreign.mkdir()
    scratch.remove_left_behind(tmp_path, "pgscratch_")
    assert left.is_dir(), "what is new may be about to be locked"
    long_ago = time.time() - 3600
    for folder in (left, held, foreign):
        os.utime(folder, (long_ago, long_ago))
    monkeypatch.setattr(os, "getuid", lambda: -1)
    scratch.remove_left_behind(tmp_path, "pgscratch_")
    assert left.is_dir(), "it would be another user's"
    monkeypatch.undo()
    scratch.remove_left_behind(tmp_path, "pgscratch_")
    assert not left.exists()
    assert held.is_dir()
    assert foreign.is_dir()
    alive.communicate("\n")
    assert not held.exists()
