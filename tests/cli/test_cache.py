"""``piecegraph cache`` and ``piecegraph warm``."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

import piecegraph
from tests.cases.commands import Run, runner
from tests.cases.modules import MLP
from tests.cases.tiny_llm import write_tiny_llm


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner("cache", monkeypatch, capsys)


def keep(gain: float) -> None:
    """An entry for each value."""
    module = MLP()
    module.gain = gain
    with torch.no_grad():
        piecegraph.compile(module, backend="eager")(torch.ones(3, 12))


def keys(run: Run) -> list[str]:
    return [entry["key"] for entry in json.loads(run("ls", "--json").out)]


def test_an_empty_cache(run: Run) -> None:
    assert keys(run) == []
    assert run("ls").err.startswith("0 entries, 0.0 MiB in ")
    assert run("verify").code == run("prune").code == run("clear").code == 0
    assert run("show", "k").code == 1


def test_entries_are_listed_shown_and_compared(run: Run) -> None:
    keep(1.0)
    keep(2.0)
    second, first = keys(run)
    listed = run("ls").out
    assert f"{first}  " in listed
    assert listed.count("  MLP\n") == 2
    shown = run("show", first[:8]).out
    assert shown.startswith("MLP in ")
    assert "\nconfiguration\n" in shown
    assert "  gain: 1.0\n" in shown
    assert json.loads(run("show", first, "--json").out)["factors"]["configuration"]["gain"] == "1.0"
    assert run("diff", first, second).out == "configuration: gain\n  - 1.0\n  + 2.0\n"
    difference = {"factor": "configuration: gain", "first": "1.0", "second": "2.0"}
    assert json.loads(run("diff", first, second, "--json").out) == [difference]
    done = run("show", "nothing")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: PG675 no entry has a key that begins with 'nothing'")
    assert "PG675 2 entries have keys that begin with ''" in run("show", "").err


def test_damage_is_told_and_pruned(run: Run, root: Path) -> None:
    keep(1.0)
    keep(2.0)
    second, first = keys(run)
    assert run("verify").code == 0
    (root / "plans" / first / "trace.pickle").write_bytes(b"")
    (root / "plans" / second / "entry.json").write_bytes(b"")
    done = run("verify")
    assert done.code == 1
    assert f"{first}  trace.pickle is not what was written\n" in done.out
    assert f"{second}  damaged: entry.json: " in run("ls").out
    assert run("prune").out == f"{second}\n"
    assert run("prune", "--max-gib", "0").out == f"{first}\n"
    assert keys(run) == []


def test_entries_are_removed(run: Run) -> None:
    keep(1.0)
    keep(2.0)
    second, first = keys(run)
    assert run("clear", first[:10]).code == 0
    assert keys(run) == [second]
    assert run("clear").code == 0
    assert keys(run) == []


def test_a_cache_is_carried_to_another_machine(
    run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(1.0)
    keep(2.0)
    file, there = tmp_path / "plans.tar.gz", keys(run)
    assert run("export", str(file)).err == f"2 entries in {file}\n"
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "there"))
    assert sorted(run("import", str(file)).out.split()) == sorted(there)
    assert run("import", str(file)).code == 0, "they are there already"
    shutil.rmtree(root)
    module = MLP()
    module.gain = 2.0
    fast = piecegraph.compile(module, backend="eager")
    with torch.no_grad():
        fast(torch.ones(3, 12))
    assert "cache: warm" in fast.explain()


def test_an_archive_that_is_not_whole_is_refused(run: Run, tmp_path: Path) -> None:
    keep(1.0)
    file = tmp_path / "plans.tar.gz"
    run("export", str(file))
    run("clear")
    whole = file.read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"no archive"):
        file.write_bytes(data)
        done = run("import", str(file))
        assert done.code == 1
        assert f"error: PG676 {file} cannot be imported: " in done.err
    assert keys(run) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("../entry.json", tarfile.REGTYPE), ("/entry.json", tarfile.REGTYPE), ("key/entry.json", tarfile.SYMTYPE)],
)
def test_an_archive_that_writes_elsewhere_is_refused(run: Run, tmp_path: Path, name: str, kind: bytes) -> None:
    file = tmp_path / "plans.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, "/etc/passwd", 2 if kind == tarfile.REGTYPE else 0
        archive.addfile(member, io.BytesIO(b"{}"))
    done = run("import", str(file))
    assert done.code == 1
    assert f"error: PG676 {file} cannot be imported: {name} is no file of an entry" in done.err


def test_an_unsafe_folder_is_refused(run: Run, root: Path) -> None:
    keep(1.0)
    root.chmod(0o777)
    assert run("ls").err.startswith("error: PG672 the cache folder ")


def test_a_model_is_made_warm(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_llm(tmp_path / "model")
    warm = runner("warm", monkeypatch, capsys)
    cold = warm(model, "--device", "cpu", "--max-num-seqs", "2")
    assert cold.code == 0
    assert cold.out.startswith("cache: cold (nothing is kept of ")
    found = json.loads(warm(model, "--device", "cpu", "--max-num-seqs", "2", "--json").out)
    assert found["was"] == "warm"
    assert found["stages_s"]["trace"] > 0
    with piecegraph.LLM(model, device="cpu", backend="eager", max_num_seqs=4) as llm:
        assert "cache: warm" in llm.explain(), "how many run together is no matter of the decoder"
    monkeypatch.setenv("PIECEGRAPH_CACHE", "off")
    done = warm(model, "--device", "cpu")
    assert done.code == 1
    assert "PG673" in done.err
