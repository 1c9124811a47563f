"""The cache of model folders: whole, unchanged and ours, or not used."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from piecegraph.base.cache_root import cache_root
from piecegraph.errors import CacheError
from piecegraph.llm.model import model_cache
from piecegraph.llm.model.model_cache import cached_folder

HEADER = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIECEGRAPH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(HEADER)) + HEADER + b"abcd")


def make(write: Callable[[Path], None] = write_model, num_bytes: int = 1) -> Path:
    return cached_folder("model", write, num_bytes=num_bytes)


def refuse(folder: Path) -> None:
    raise AssertionError("it is there already")


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# ------------------------------------------------------------------ where


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIECEGRAPH_CACHE", "~/mine")
    assert cache_root() == tmp_path / "mine"
    monkeypatch.setenv("PIECEGRAPH_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "piecegraph"
    for useless in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert cache_root() == tmp_path / ".cache" / "piecegraph"


# ------------------------------------------------------------------ made once, whole


def test_it_is_made_once_and_others_cannot_write_to_it(root: Path) -> None:
    old = os.umask(0o002)  # where files are writable by the group unless something is done about it
    try:
        folder = make()
    finally:
        os.umask(old)
    assert folder == root / "model"
    assert make(refuse) == folder
    assert [path.stat().st_mode & 0o077 for path in (root, folder)] == [0, 0]
    assert names(root) == {"model", ".model.lock"}


def test_a_failure_leaves_nothing(root: Path) -> None:
    def fail(folder: Path) -> None:
        write_model(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(fail)
    assert names(root) == {".model.lock"}
    assert make().is_dir()


def stop_in_the_middle(folder: Path) -> None:
    write_model(folder)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_nothing_that_is_used(root: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=make, args=(stop_in_the_middle,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    assert "model" not in names(root)
    assert len(names(root)) == 2, "its work lies around"
    made = []
    make(lambda folder: (made.append(folder), write_model(folder))[0])
    assert made
    assert names(root) == {"model", ".model.lock"}


def test_of_two_at_once_one_makes_it_and_both_have_it() -> None:
    made, found = [], []

    def slowly(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.3)
        write_model(folder)

    threads = [threading.Thread(target=lambda: found.append(make(slowly))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1
    assert len(found) == 3


# ------------------------------------------------------------------ damaged


def test_damage_is_found_told_and_mended(caplog: pytest.LogCaptureFixture) -> None:
    folder = make()
    weights, config, manifest = (folder / name for name in ("model.safetensors", "config.json", "manifest.json"))
    written = weights.read_bytes()

    def change_header() -> None:
        weights.write_bytes(written.replace(b"[4]", b"[9]"))

    damages = {
        "config.json is not what was written": lambda: config.write_text('{"layers": 3}'),
        "model.safetensors is not what was written": lambda: weights.write_bytes(written[:-1]),
        "model.safetensors is not": change_header,
        "FileNotFoundError": lambda: weights.unlink(),
        "error: unpack requires": lambda: weights.write_bytes(b"1"),
        "JSONDecodeError": lambda: manifest.write_text("{"),
        "KeyError: 'files'": lambda: manifest.write_text("{}"),
        "AttributeError": lambda: manifest.write_text('{"files": []}'),
    }
    for reason, do_damage in damages.items():
        do_damage()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert make() == folder
        assert reason in caplog.text
        assert str(folder) in caplog.text
        assert weights.read_bytes() == written
        assert model_cache.damage(folder) == ""


def test_a_file_in_its_place_is_replaced(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "model").write_text("something else")
    assert json.loads((make() / "config.json").read_text()) == {"layers": 2}


# ------------------------------------------------------------------ not ours, no room


@pytest.mark.parametrize("mode", [0o770, 0o702])
@pytest.mark.parametrize("inner", [False, True])
def test_what_others_may_write_to_is_not_trusted(mode: int, inner: bool, root: Path) -> None:
    folder = make()
    unsafe = folder if inner else root
    unsafe.chmod(mode)
    with pytest.raises(CacheError, match="PG672 .* is not safe to use: others may write to it. hint: chmod go-w"):
        make(refuse)
    unsafe.chmod(0o755)
    assert make(refuse) == folder


def test_what_belongs_to_someone_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheError, match=r"PG672 .* belongs to user \d+, not to \d+. hint: set PIECEGRAPH_CACHE"):
        make(refuse)


def test_no_room(root: Path) -> None:
    with pytest.raises(
        CacheError, match=r"PG673 .*cannot be used: \d+ MiB are needed and \d+ MiB are free. hint: make"
    ):
        make(num_bytes=2**60)

    def fill_the_disk(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CacheError, match=r"PG673 the cache folder .*cannot be used: No space left on device. hint: make"
    ):
        make(fill_the_disk)
    assert names(root) == {".model.lock"}


def test_a_folder_that_cannot_be_made(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(CacheError, match="PG673 .*: File exists"):
        make()
