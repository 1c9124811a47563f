"""Entries of the cache on disk: a folder for each key, whole, unchanged and ours, or not used at all.

Note [Entries]
~~~~~~~~~~~~~~
An entry is a folder of files and ``entry.json``, which holds the factors of its key and a hash of every file, and of
itself. It is written under another name and renamed, so whoever finds it finds all of it; no path in it is followed, so
it may lie anywhere; and nothing runs in it: a process copies what it needs, checking each hash on the way. So entries
can be removed, or replaced by another process, at any time.

There may be thousands, and one is written and looked for at every cold start. So what they take together is written
down: it holds as long as there are as many, and if it is too much, it is counted anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from piecegraph.base.cache_root import locked, require_ours, usable_root
from piecegraph.errors import CacheError

FORMAT = 1
"""Of what is written. Another number is another version's."""

Factors = Mapping[str, Mapping[str, str]]
"""What a key is made of: groups of names with a text each."""

Changes = list[tuple[str, str, str]]
"""(factor, before, now) of each that differs."""

_PLANS = "plans"
_INDEX = "entry.json"
_LOCK = ".lock"
_TOTAL = ".total"
_WORK = ".new-"
_DEFAULT_GIB = 16.0


class DamagedEntryError(Exception):
    """An entry is not what was written."""


@dataclass(frozen=True)
class Entry:
    """An entry, as its index describes it."""

    folder: Path
    key: str
    name: str
    """Of what was compiled."""
    made: float
    """Seconds since the epoch."""
    used: float
    factors: Factors
    facts: Mapping[str, Any]
    """What else is worth knowing, for people."""
    files: Mapping[str, tuple[int, str]]
    """Bytes and hash of each."""

    @property
    def num_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def copy_to(self, folder: Path) -> None:
        """Copy the files to a folder, each of them checked. Raises DamagedEntryError."""
        for parent in {os.path.dirname(name) for name in self.files}:
            (folder / parent).mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in self.files:
            (folder / name).write_bytes(self.read(name))

    def read(self, name: str) -> bytes:
        """A file, checked. Raises DamagedEntryError."""
        size, expected = self.files[name]
        try:
            file = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW)
            with open(file, "rb") as opened:
                found = os.fstat(file)
                data = opened.read()
        except OSError as error:
            raise DamagedEntryError(f"{name}: {error.strerror}") from error
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise DamagedEntryError(f"others may write to {name}, or it is not ours")
        if len(data) != size or hashlib.sha256(data).hexdigest() != expected:
            raise DamagedEntryError(f"{name} is not what was written")
        return data


def find_entry(key: str) -> Entry | None:
    """The entry of a key, marked as used where that can be; None if there is none.

    Raises DamagedEntryError, CacheError.
    """
    with usable_root() as root:
        folder = root / _PLANS / key
        if not folder.exists():
            return None
        require_ours(folder.parent)
        try:
            require_ours(folder)
            entry = _read_index(folder)
        except FileNotFoundError:  # another process has just removed it
            return None
        with contextlib.suppress(OSError):  # in an image, or mounted to be read: nothing is ever removed there
            os.utime(folder)
        if entry.key != key:
            raise DamagedEntryError(f"it is the entry of {entry.key}")
        return entry


def all_entries() -> Iterator[Entry | tuple[Path, str]]:
    """Every entry; of one that cannot be read, its folder and what is wrong."""
    with usable_root() as root:
        for folder in _folders(root / _PLANS):
            try:
                require_ours(folder)
                yield _read_index(folder)
            except (DamagedEntryError, CacheError, FileNotFoundError) as error:
                yield folder, str(error)


def entries_of(name: str) -> Iterator[Entry]:
    """The entries of what is compiled under a name, but for those that cannot be read."""
    written = f'"name": {json.dumps(name)}'  # in the index of each, and of few others
    with usable_root() as root:
        for folder in _folders(root / _PLANS):
            with contextlib.suppress(DamagedEntryError, CacheError, OSError, ValueError):
                if written in (folder / _INDEX).read_text():
                    require_ours(folder)
                    entry = _read_index(folder)
                    if entry.name == name:
                        yield entry


def _folders(plans: Path) -> list[Path]:
    return sorted(folder for folder in plans.iterdir() if folder.name[0] != ".") if plans.exists() else []


def write_entry(
    key: str, name: str, factors: Factors, facts: Mapping[str, Any], files: Path, *, replaces: bool
) -> None:
    """Make an entry of the files in a folder. See Note [Entries].

    Args:
        key: of the entry.
        name: of what was compiled.
        factors: of the key.
        facts: what else is worth knowing.
        files: the folder, which is copied.
        replaces: whether it takes the place of an entry that is there. If not, another process was quicker.
    """
    with usable_root() as root:
        plans = root / _PLANS
        plans.mkdir(mode=0o700, exist_ok=True)
        require_ours(plans)
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=plans))
        try:
            fresh = work / key
            shutil.copytree(files, fresh)
            fresh.chmod(0o700)
            _write_index(fresh, key, name, factors, facts)
            _take_in(_read_index(fresh), plans, replaces=replaces)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def adopt_entry(folder: Path) -> Entry:
    """Take in an entry that lies in a folder of ours, unless it is there already. Raises DamagedEntryError."""
    entry = _read_index(folder)
    for path in sorted(folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    if damage := damage_of(entry):
        raise DamagedEntryError(damage)
    with usable_root() as root:
        plans = root / _PLANS
        plans.mkdir(mode=0o700, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=plans))
        try:
            shutil.copytree(folder, work / entry.key)
            _take_in(replace(entry, folder=work / entry.key), plans, replaces=False)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return entry


def remove_entry(key: str) -> None:
    """Remove an entry, or what is left of one."""
    with usable_root() as root, locked(root / _PLANS / _LOCK):
        _remove(root / _PLANS / key)


def prune(most_bytes: int | None = None) -> list[str]:
    """Remove damaged entries, unfinished work, and the least recently used until the others fit; their names."""
    with usable_root() as root:
        plans = root / _PLANS
        if not plans.exists():
            return []
        with locked(plans / _LOCK):
            damaged = [found[0] for found in all_entries() if isinstance(found, tuple)]
            for folder in (*damaged, *plans.glob(f"{_WORK}*")):
                _remove(folder)
            return [folder.name for folder in damaged] + _drop_oldest(plans, most_bytes=most_bytes)


def limit_bytes() -> int:
    """What all entries may take together: ``PIECEGRAPH_CACHE_GIB``."""
    try:
        gib = float(os.environ.get("PIECEGRAPH_CACHE_GIB", _DEFAULT_GIB))
    except ValueError as error:
        raise CacheError("PG673", "PIECEGRAPH_CACHE_GIB is not a number", why=str(error)) from error
    return int(gib * 2**30)


def changes(before: Factors, now: Factors) -> Changes:
    """The factors in which two keys differ.

    >>> changes({"options": {"backend": "eager"}}, {"options": {"backend": "inductor"}})
    [('options: backend', 'eager', 'inductor')]
    """
    found: Changes = []
    for group in dict.fromkeys((*before, *now)):
        old, new = before.get(group, {}), now.get(group, {})
        found += [
            (f"{group}: {name}", old.get(name, "nothing"), new.get(name, "nothing"))
            for name in dict.fromkeys((*old, *new))
            if old.get(name) != new.get(name)
        ]
    return found


def entry_named(beginning: str) -> Entry:
    """The entry whose key begins so. Raises CacheError if there is none, or several."""
    found = [entry for entry in all_entries() if isinstance(entry, Entry) and entry.key.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    what = f"no entry has a key that begins with {beginning!r}"
    if found:
        what = f"{len(found)} entries have keys that begin with {beginning!r}"
    raise CacheError("PG675", what, hint="piecegraph cache ls lists them")


def damage_of(entry: Entry) -> str:
    """What is wrong with the files of an entry; empty if nothing is."""
    try:
        for name in entry.files:
            entry.read(name)
    except DamagedEntryError as error:
        return str(error)
    return ""


def _take_in(fresh: Entry, plans: Path, *, replaces: bool) -> None:
    """Put an entry in its place; the least recently used go if all take too much together."""
    folder = plans / fresh.key
    with locked(plans / _LOCK):
        total = _known_total(plans)
        if replaces or not folder.exists():
            _put(fresh.folder, folder)
            total = None if total is None else total + fresh.num_bytes
        if total is None or total > limit_bytes():
            _drop_oldest(plans, keep=fresh.key)
        else:
            _write_total(plans, total)


def _known_total(plans: Path) -> int | None:
    """What all entries take together, or somewhat more; None if that is not known."""
    try:
        num_entries, num_bytes = map(int, (plans / _TOTAL).read_text().split())
    except (OSError, ValueError):
        return None
    return num_bytes if num_entries == len(_folders(plans)) else None


def _write_total(plans: Path, num_bytes: int) -> None:
    (plans / _TOTAL).write_text(f"{len(_folders(plans))} {num_bytes}")


def _put(fresh: Path, folder: Path) -> None:
    """A folder cannot be renamed onto one that holds something: the old one goes out of the way first."""
    if os.path.lexists(folder):
        folder.rename(fresh.parent / "old")
    fresh.rename(folder)


def _remove(folder: Path) -> None:
    """Out of its place at once, so that nobody finds half of it."""
    gone = folder.with_name(f"{_WORK}{folder.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()


def _drop_oldest(plans: Path, *, keep: str = "", most_bytes: int | None = None) -> list[str]:
    most = limit_bytes() if most_bytes is None else most_bytes
    found = [entry for entry in all_entries() if isinstance(entry, Entry)]
    total, dropped = sum(entry.num_bytes for entry in found), []
    for entry in sorted(found, key=lambda entry: entry.used):
        if total > most and entry.key != keep:
            _remove(plans / entry.key)
            dropped.append(entry.key)
            total -= entry.num_bytes
    _write_total(plans, total)
    return dropped


def _write_index(folder: Path, key: str, name: str, factors: Factors, facts: Mapping[str, Any]) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): _fingerprint(path) for path in paths}
    for path in paths:
        path.chmod(0o600)
    content = {
        "format": FORMAT,
        "key": key,
        "name": name,
        "made": time.time(),
        "factors": factors,
        "facts": facts,
        "files": files,
    }
    (folder / _INDEX).write_text(json.dumps({**content, "sha256": _hash_of(content)}, indent=1))


def _read_index(folder: Path) -> Entry:
    try:
        content = json.loads((folder / _INDEX).read_text())
        expected = content.pop("sha256")
        used = folder.stat().st_mtime
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DamagedEntryError(f"{_INDEX}: {type(error).__name__}: {error}") from error
    if expected != _hash_of(content):
        raise DamagedEntryError(f"{_INDEX} is not what was written")
    if content["format"] != FORMAT:
        raise DamagedEntryError(f"it is of format {content['format']}, and this version writes {FORMAT}")
    files = {name: (size, digest) for name, (size, digest) in content["files"].items()}
    return Entry(
        folder, content["key"], content["name"], content["made"], used, content["factors"], content["facts"], files
    )


def _hash_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fingerprint(path: Path) -> tuple[int, str]:
    data = path.read_bytes()
    return len(data), hashlib.sha256(data).hexdigest()
