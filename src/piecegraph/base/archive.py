"""Entries of the cache in one file, to be carried to another machine of the same kind."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

from piecegraph.base.entries import DamagedEntryError, Entry, adopt_entry
from piecegraph.errors import CacheError


def export_entries(entries: Iterable[Entry], file: Path) -> None:
    """Write entries to an archive. The files are checked on the way. Raises DamagedEntryError."""
    with tarfile.open(file, "w:gz") as archive:
        for entry in entries:
            for name in ("entry.json", *entry.files):
                data = entry.read(name) if name in entry.files else (entry.folder / name).read_bytes()
                member = tarfile.TarInfo(f"{entry.key}/{name}")
                member.size, member.mode = len(data), 0o600
                archive.addfile(member, io.BytesIO(data))


def import_entries(file: Path) -> list[Entry]:
    """Take in all entries of an archive, or none. What is there already stays as it is."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(file) as archive:
                archive.extractall(folder, filter="data")
            return [adopt_entry(path) for path in sorted(Path(folder).iterdir())]
        except (OSError, tarfile.TarError, EOFError, DamagedEntryError) as error:
            raise CacheError(
                "PG676", f"{file} cannot be imported", why=str(error), hint="export it again, and copy all of it"
            ) from error
