"""The benchmark of starts: what it writes, starts from, and tells."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import start
import starts

_TELLS = f"""
import os
assert os.environ["PIECEGRAPH_CACHE"] == "a cache"
print("something else")
print('{starts.STARTED_BY} {{"wall": 2.0, "stages": {{"import": 1.25, "load": 0.75}}, "cache": "cache: warm"}}')
"""


def test_a_start_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))
    folder = start.write_checkpoint("tiny", tmp_path)
    files = sorted(folder.glob("*.safetensors"))
    assert start.write_checkpoint("tiny", tmp_path) == folder, "and it is not written again"
    assert start.disk_rate(files) > 0
    found = start.start(str(folder), {"backend": "eager", "device": "cpu", "max_model_len": 64})
    assert found.first_token is not None
    assert found.cache.startswith("cache: cold")
    starts.show({"cold": found})
    head, row, told = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["seconds", "import", "load", "trace"]
    assert row.startswith("cold")
    assert told == f"  cold: {found.cache}"


def test_a_start_in_a_process_of_its_own() -> None:
    found = starts.run_start(["-c", _TELLS], "a cache")
    assert found == starts.Start(2.0, {"import": 1.25, "load": 0.75}, "cache: warm")
