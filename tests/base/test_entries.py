"""Entries of the cache: whole, unchanged and ours, or not used; several processes at once; bounded."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from piecegraph.base import entries
from piecegraph.base.entries import (
    DamagedEntryError,
    Entry,
    all_entries,
    entries_of,
    find_entry,
    prune,
    remove_entry,
    write_entry,
)
from piecegraph.errors import CacheError

FACTORS = {"options": {"backend": "eager"}}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(key: str, tmp_path: Path, text: str = "trace", *, replaces: bool = True) -> Path:
    """An entry of two files, one of them in a folder."""
    files = tmp_path / f"files of {key}"
    (files / "compiled").mkdir(parents=True, exist_ok=True)
    (files / "trace").write_text(text)
    (files / "compiled" / "kernel").write_text(text * 2)
    write_entry(key, "Model", FACTORS, {}, files, replaces=replaces)
    return Path(os.environ["PIECEGRAPH_CACHE"]) / "plans" / key


def read(key: str, folder: Path) -> dict[str, str]:
    entry = find_entry(key)
    assert entry is not None
    entry.copy_to(folder)
    return {name: (folder / name).read_text() for name in entry.files}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert find_entry("k") is None
    write("k", tmp_path)
    assert read("k", tmp_path / "out") == {"trace": "trace", "compiled/kernel": "tracetrace"}
    write("k", tmp_path, "late", replaces=False)
    assert read("k", tmp_path / "out")["trace"] == "trace"
    write("k", tmp_path, "new")
    assert read("k", tmp_path / "out")["trace"] == "new"
    assert [entry.key for entry in all_entries() if isinstance(entry, Entry)] == ["k"]


def test_an_entry_lies_anywhere(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("k", tmp_path)
    root.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "elsewhere"))
    assert read("k", tmp_path / "out")["trace"] == "trace"


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    folder = write("k", tmp_path)
    for name in ("trace", "compiled/kernel", "entry.json"):
        whole = (folder / name).read_bytes()
        for number in range(0, len(whole), 7):
            (folder / name).write_bytes(whole[:number] + bytes([whole[number] ^ 1]) + whole[number + 1 :])
            with pytest.raises(DamagedEntryError):
                read("k", tmp_path / "out")
        (folder / name).write_bytes(whole[:-1])
        with pytest.raises(DamagedEntryError):
            read("k", tmp_path / "out")
        (folder / name).unlink()
        with pytest.raises(DamagedEntryError):
            read("k", tmp_path / "out")
        (folder / name).write_bytes(whole)
        (folder / name).chmod(0o600)
        assert read("k", tmp_path / "out")["trace"] == "trace"


def test_another_version_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "FORMAT", 0)
    write("k", tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DamagedEntryError, match="it is of format 0, and this version writes 1"):
        find_entry("k")


def test_an_entry_under_another_name(tmp_path: Path) -> None:
    folder = write("k", tmp_path)
    folder.rename(folder.with_name("other"))
    with pytest.raises(DamagedEntryError, match="it is the entry of k"):
        find_entry("other")


@pytest.mark.parametrize("place", ["", "plans", "plans/k"])
def test_what_others_may_write_to_is_refused(tmp_path: Path, root: Path, place: str) -> None:
    write("k", tmp_path)
    (root / place).chmod(0o777)
    with pytest.raises(CacheError, match="PG672 .* is not safe to use: others may write to it. hint: chmod go-w"):
        find_entry("k")


def test_a_file_that_others_may_write_to_or_a_link_is_damage(tmp_path: Path, root: Path) -> None:
    trace = write("k", tmp_path) / "trace"
    trace.chmod(0o666)
    with pytest.raises(DamagedEntryError, match="others may write to trace"):
        read("k", tmp_path / "out")
    (tmp_path / "elsewhere").write_text("trace")
    trace.unlink()
    trace.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedEntryError):
        read("k", tmp_path / "out")


def _write_again_and_again(number: int, tmp_path: Path) -> None:
    for turn in range(20):
        write("k", tmp_path / str(number), f"{number} {turn} " * 2000)


def test_processes_that_race_on_a_key(tmp_path: Path) -> None:
    """While some write, others read: what is found is whole, each time, and of one writer."""
    write("k", tmp_path, "first")
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write_again_and_again, args=(number, tmp_path)) for number in range(3)]
    for writer in writers:
        writer.start()
    num_reads = 0
    while any(writer.is_alive() for writer in writers):
        try:
            found = read("k", tmp_path / "out")
        except (DamagedEntryError, AssertionError):  # replaced since its index was read
            continue
        assert found["trace"] * 2 == found["compiled/kernel"]
        num_reads += 1
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert num_reads > 0
    assert {path.name for path in (tmp_path / "cache" / "plans").iterdir()} == {".lock", ".total", "k"}
    assert read("k", tmp_path / "out")["trace"]


def test_the_least_recently_used_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, key in enumerate("abc"):
        os.utime(write(key, tmp_path, "x" * 1000), (number, number))
    find_entry("a")
    monkeypatch.setenv("PIECEGRAPH_CACHE_GIB", str(9000 / 2**30))  # three of four
    write("d", tmp_path, "x" * 1000)
    assert [entry.key for entry in all_entries() if isinstance(entry, Entry)] == ["a", "c", "d"]
    monkeypatch.setenv("PIECEGRAPH_CACHE_GIB", "0")
    write("e", tmp_path, "x" * 1000)
    assert [entry.key for entry in all_entries() if isinstance(entry, Entry)] == ["e"], "what was just made stays"


def test_others_are_not_read_when_one_is_written(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands of them."""
    for key in "abcd":
        write(key, tmp_path, "x" * 1000)
    read = []

    def read_index(folder: Path) -> Entry:
        read.append(folder.name)
        return original(folder)

    original = entries._read_index
    monkeypatch.setattr(entries, "_read_index", read_index)
    write("e", tmp_path, "x" * 1000)
    write("e", tmp_path, "x" * 1000)
    assert read == ["e", "e"]
    remove_entry("a")  # or whoever else has been there
    write("f", tmp_path, "x" * 1000)
    assert read[2:] == ["f", "b", "c", "d", "e", "f"]
    del read[:]
    (root / "plans" / ".total").write_text("?")
    write("g", tmp_path, "x" * 1000)
    assert read == ["g", "b", "c", "d", "e", "f", "g"]
    monkeypatch.setenv("PIECEGRAPH_CACHE_GIB", str(7000 / 2**30))
    write("h", tmp_path, "x" * 1000)
    assert [entry.key for entry in all_entries() if isinstance(entry, Entry)] == ["g", "h"]


def test_the_entries_of_a_name(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in "abc":
        write(key, tmp_path)
    other = tmp_path / "files of a"
    write_entry("d", 'Other "one"', {"options": {"name": "Model"}}, {}, other, replaces=True)
    (root / "plans" / "b" / "entry.json").write_text('{"name": "Model"')
    (root / "plans" / "e").mkdir()
    assert [entry.key for entry in entries_of("Model")] == ["a", "c"]
    assert [entry.key for entry in entries_of('Other "one"')] == ["d"]
    assert list(entries_of("Mode")) == []


def test_pruning(tmp_path: Path, root: Path) -> None:
    for key in "abc":
        write(key, tmp_path)
    (root / "plans" / "b" / "entry.json").write_text("{")
    (root / "plans" / ".new-killed").mkdir()
    assert prune() == ["b"]
    assert {path.name for path in (root / "plans").iterdir()} == {".lock", ".total", "a", "c"}
    assert set(prune(0)) == {"a", "c"}


def test_factors_can_be_read(tmp_path: Path) -> None:
    folder = write("k", tmp_path)
    assert json.loads((folder / "entry.json").read_text())["factors"] == FACTORS
