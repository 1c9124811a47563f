"""Model folders that were made once and are used again: whole, unchanged and ours, or not used at all.

Note [A folder appears whole]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A folder is made under another name beside its place and then renamed, so whoever finds it finds all of it. Who makes it
holds a lock, which ends with the process: a second process waits and finds the folder made, and work that lies around
while the lock is free is that of a process which was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from piecegraph.errors import ModelError

_LOG = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_MISSING = "it is not there"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_root() -> Path:
    """Where piecegraph keeps what it makes: ``PIECEGRAPH_CACHE``, or a folder in the user's cache."""
    chosen = os.environ.get("PIECEGRAPH_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "piecegraph"
    except RuntimeError as error:
        raise ModelError(
            "PG673", "there is no place for a cache", why=str(error), hint="set PIECEGRAPH_CACHE to a folder"
        ) from error


def cached_folder(name: str, make: Callable[[Path], None], *, num_bytes: int) -> Path:
    """The folder of that name in the cache, made now if it is not there or damaged. See Note [A folder appears whole].

    Args:
        name: of the folder.
        make: writes the files into the empty folder it is given.
        num_bytes: how large they are, about.

    Raises:
        ModelError: PG672, others may write to the cache; PG673, we may not, or it is full.
    """
    root = cache_root()
    folder = root / name
    with _told_as_ours(root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_ours(root)
        if damage(folder):
            with _locked(root / f".{name}.lock"):
                reason = damage(folder)
                if reason and reason != _MISSING:
                    _LOG.warning("%s is damaged (%s) and is made again", folder, reason)
                if reason:
                    _make_whole(folder, make, num_bytes)
    return folder


def damage(folder: Path) -> str:
    """What is wrong with a folder of the cache; empty if nothing is.

    Raises:
        ModelError: PG672, others may write to it.
    """
    if not folder.exists():
        return _MISSING
    _require_ours(folder)
    try:
        expected = json.loads((folder / _MANIFEST).read_text())["files"]
        wrong = [name for name, found in expected.items() if _fingerprint(folder / name) != found]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        return f"{type(error).__name__}: {error}"
    return f"{wrong[0]} is not what was written" if wrong else ""


def _make_whole(folder: Path, make: Callable[[Path], None], num_bytes: int) -> None:
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < num_bytes:
        raise OSError(f"{num_bytes / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free")
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh = work / "new"
        fresh.mkdir(mode=0o700)
        make(fresh)
        files = {path.name: _fingerprint(path) for path in sorted(fresh.iterdir())}
        (fresh / _MANIFEST).write_text(json.dumps({"files": files}, indent=2))
        if os.path.lexists(folder):
            folder.rename(work / "old")
        fresh.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fingerprint(path: Path) -> dict[str, Any]:
    """The size of a file and a hash of it.

    Of weights, the header is hashed: it says where each tensor ends, and to hash them all would take as long as to load
    them.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = file.read(8)
            hashed = length + file.read(min(struct.unpack("<Q", length)[0], num_bytes))
        else:
            hashed = file.read()
    return {"bytes": num_bytes, "sha256": hashlib.sha256(hashed).hexdigest()}


def _require_ours(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
        hint = "set PIECEGRAPH_CACHE to a folder of your own"
    elif found.st_mode & _OTHERS_MAY_WRITE:
        reason, hint = "others may write to it", f"chmod go-w {folder}"
    else:
        return
    raise ModelError("PG672", f"the cache folder {folder} is not safe to use", why=reason, hint=hint)


@contextlib.contextmanager
def _told_as_ours(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            "PG673",
            f"the cache folder {root} cannot be used",
            why=error.strerror or str(error),
            hint="make room there, or set PIECEGRAPH_CACHE to another folder",
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
