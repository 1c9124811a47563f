"""Model folders that were made once and are used again: whole, unchanged and ours, or not used at all.

Note [A folder appears whole]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A folder is made under another name beside its place and then renamed, so whoever finds it finds all of it. Who makes it
holds a lock, which ends with the process: a second process waits and finds the folder made, and work that lies around
while the lock is free is that of a process which was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from piecegraph.base.cache_root import locked, require_ours, usable_root

_LOG = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_MISSING = "it is not there"


def cached_folder(name: str, make: Callable[[Path], None], *, num_bytes: int) -> Path:
    """The folder of that name in the cache, made now if it is not there or damaged. See Note [A folder appears whole].

    Args:
        name: of the folder.
        make: writes the files into the empty folder it is given.
        num_bytes: how large they are, about.

    Raises:
        CacheError: PG672, others may write to the cache; PG673, we may not, or it is full.
    """
    with usable_root() as root:
        folder = root / name
        if damage(folder):
            with locked(root / f".{name}.lock"):
                reason = damage(folder)
                if reason and reason != _MISSING:
                    _LOG.warning("%s is damaged (%s) and is made again", folder, reason)
                if reason:
                    _make_whole(folder, make, num_bytes)
    return folder


def damage(folder: Path) -> str:
    """What is wrong with a folder of the cache; empty if nothing is.

    Raises:
        CacheError: PG672, others may write to it.
    """
    if not folder.exists():
        return _MISSING
    require_ours(folder)
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
