"""Logs as blocks of lines: files, standard input, gzip. A log of any size is read with the same memory.

In come paths, out come lists of decoded lines. Every input either gives lines or raises :class:`InputError`; bytes
that are no text are replaced, never fatal.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

from piecegraph.errors import InputError

STANDARD_INPUT = "-"
BLOCK_BYTES = 1 << 20
MAX_LINE = 1 << 16
"""Longer lines are cut: no traceback needs them, and a file without line ends must not fill the memory."""

_GZIP_MAGIC = b"\x1f\x8b"
_WIDE = ((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
         (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"), (codecs.BOM_UTF8, "utf-8-sig"))  # fmt: skip
_CONTROL = bytes(set(range(32)) - set(b"\t\n\r\x08\x0c\x1b"))
_BINARY_SHARE = 0.05
_NULS = re.compile(rb"\0{64,}")
"""What a file system leaves where a log was cut while it was written, or where a machine went down; a database, too."""
_DATABASE = b"SQLite format 3\0"
_BINARY_HINT = "give the text that the run printed; a profile or a core file is none"


@dataclass(slots=True)
class Log:
    """One log. ``blocks()`` may be walked once."""

    path: str
    num_lines: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "standard input" if self.path == STANDARD_INPUT else self.path

    @property
    def num_bytes(self) -> int:
        """The size on disk, 0 where it is not known."""
        return os.path.getsize(self.path) if os.path.isfile(self.path) else 0

    def blocks(self, on_bytes: Callable[[int], None] = lambda position: None) -> Iterator[list[str]]:
        """The lines without their ends, a MiB at a time; ``on_bytes`` is told how far into the file they reach."""
        raw = self._open()
        try:
            first = self._read(raw)
            unpacked: IO[bytes] | gzip.GzipFile = raw
            if first.startswith(_GZIP_MAGIC):
                unpacked = gzip.GzipFile(fileobj=_Rejoined(first, raw))
                first = self._read(unpacked)
            decoder = self._decoder(first)
            splitter = _Splitter()
            while first:
                lines = splitter.split(decoder.decode(first).replace("\0", ""))
                self.num_lines += len(lines)
                yield lines
                if raw.seekable():
                    on_bytes(raw.tell())
                first = self._read(unpacked)
            rest = splitter.rest(decoder.decode(b"", final=True))
            self.num_lines += len(rest)
            yield rest
        finally:
            if self.path != STANDARD_INPUT:
                raw.close()
        if splitter.num_cut:
            self.notes.append(f"{self.name}: {splitter.num_cut} lines longer than {MAX_LINE >> 10} KiB were cut")

    def _open(self) -> IO[bytes]:
        if self.path == STANDARD_INPUT:
            if sys.stdin is None:
                raise InputError("PG601", "standard input cannot be read", why="it is closed", hint="pipe a log in")
            return sys.stdin.buffer
        try:
            return open(self.path, "rb")
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise InputError("PG601", f"{self.path} cannot be read", why=why, hint="check the path") from error

    def _read(self, stream: IO[bytes] | gzip.GzipFile) -> bytes:
        if not isinstance(stream, gzip.GzipFile):
            return stream.read(BLOCK_BYTES)
        parts, missing = [], BLOCK_BYTES
        try:
            # In small steps: a file that ends early gives everything up to its end.
            while missing > 0 and (part := stream.read1(missing)):
                parts.append(part)
                missing -= len(part)
        except EOFError:
            self.notes.append(f"{self.name}: the compressed file ends early; what it holds up to there was read")
        except (OSError, zlib.error) as error:
            raise InputError("PG601", f"{self.name} cannot be read", why=str(error), hint="unpack it first") from error
        return b"".join(parts)

    def _decoder(self, first: bytes) -> codecs.IncrementalDecoder:
        for mark, encoding in _WIDE:
            if first.startswith(mark):
                return codecs.getincrementaldecoder(encoding)("replace")
        head = _NULS.sub(b"", first[:MAX_LINE])
        if first.startswith(_DATABASE) or len(head) - len(head.translate(None, _CONTROL)) > _BINARY_SHARE * len(head):
            raise InputError("PG603", f"{self.name} is no text", why="it holds binary data", hint=_BINARY_HINT)
        return codecs.getincrementaldecoder("utf-8")("replace")


def name_logs(logs: list[Log]) -> dict[str, str]:
    """A short name for each of several logs: the path without what all of them share.

    >>> name_logs([Log("/tmp/job/0/stderr.log"), Log("/tmp/job/1/stderr.log")])
    {'/tmp/job/0/stderr.log': '0/stderr.log', '/tmp/job/1/stderr.log': '1/stderr.log'}
    """
    if len(logs) < 2:
        return {log.path: "" for log in logs}
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(log.path)) for log in logs])
    return {
        log.path: log.name if log.path == STANDARD_INPUT else os.path.relpath(os.path.abspath(log.path), shared)
        for log in logs
    }


class _Splitter:
    """Cuts text into lines and keeps the unfinished last one for the next piece."""

    def __init__(self) -> None:
        self._pending = ""
        self.num_cut = 0

    def split(self, text: str) -> list[str]:
        lines = (self._pending + text).split("\n")
        self._pending = self._bounded(lines.pop())
        return [line if len(line) <= MAX_LINE else self._bounded(line) for line in lines]

    def rest(self, text: str) -> list[str]:
        lines = self.split(text)
        return [*lines, self._pending] if self._pending else lines

    def _bounded(self, line: str) -> str:
        if len(line) <= MAX_LINE:
            return line
        self.num_cut += 1
        # Of a progress bar, which rewrites one line for hours, a terminal shows the end.
        return line[line.rfind("\r", 0, -1) + 1 :][:MAX_LINE]


class _Rejoined(io.RawIOBase):
    """A stream whose first bytes were already read: standard input cannot seek back to its magic number."""

    def __init__(self, first: bytes, rest: IO[bytes]) -> None:
        self._first, self._rest = first, rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._first:
            taken, self._first = (self._first, b"") if size < 0 else (self._first[:size], self._first[size:])
            return taken
        return self._rest.read(size)
