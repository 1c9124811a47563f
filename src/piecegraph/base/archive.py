"""Entries of the cache in one file, to be carried to another machine of the same kind."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

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
                _unpack(archive, Path(folder))
            return [adopt_entry(path) for path in sorted(Path(folder).iterdir())]
        except (OSError, tarfile.TarError, EOFError, DamagedEntryError) as error:
            raise CacheError(
                "PG676", f"{file} cannot be imported", why=str(error), hint="export it again, and copy all of it"
            ) from error


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Write what an archive of ours holds: files below the folder, and nothing else.

    The filters of ``tarfile`` do the same, but the first releases of Python 3.11, Debian 12's for one, have none.
    """
    for member in archive:
        name, data = PurePosixPath(member.name), archive.extractfile(member) if member.isfile() else None
        if data is None or name.is_absolute() or ".." in name.parts:
            raise DamagedEntryError(f"{member.name} is no file of an entry")
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data.read())
