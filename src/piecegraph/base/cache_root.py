"""Where piecegraph keeps what it makes, and whether that place is ours: what lies there is run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from piecegraph.errors import CacheError

OFF = "off"
"""As ``PIECEGRAPH_CACHE``: plans are not kept."""

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def is_on() -> bool:
    """Whether plans are kept at all."""
    return os.environ.get("PIECEGRAPH_CACHE") != OFF


def cache_root() -> Path:
    """Where piecegraph keeps what it makes: ``PIECEGRAPH_CACHE``, or a folder in the user's cache."""
    chosen = os.environ.get("PIECEGRAPH_CACHE")
    if chosen and chosen != OFF:
        return Path(chosen).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "piecegraph"
    except RuntimeError as error:
        raise CacheError(
            "PG673", "there is no place for a cache", why=str(error), hint="set PIECEGRAPH_CACHE to a folder"
        ) from error


@contextlib.contextmanager
def usable_root() -> Iterator[Path]:
    """The folder, made if need be, for as long as it is used.

    Raises:
        CacheError: PG672, others may write to it; PG673, we may not, or it is full.
    """
    root = cache_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_ours(root)
        yield root
    except OSError as error:
        raise CacheError(
            "PG673",
            f"the cache folder {root} cannot be used",
            why=error.strerror or str(error),
            hint="make room there, or set PIECEGRAPH_CACHE to another folder",
        ) from error


def require_ours(path: Path) -> None:
    """Refuse a folder or file of somebody else's, or that others may write to."""
    found = path.stat()
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
        hint = "set PIECEGRAPH_CACHE to a folder of your own"
    elif found.st_mode & _OTHERS_MAY_WRITE:
        reason, hint = "others may write to it", f"chmod go-w {path}"
    else:
        return
    raise CacheError("PG672", f"the cache folder {path} is not safe to use", why=reason, hint=hint)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock, which ends with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
