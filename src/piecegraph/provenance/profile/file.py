"""Reading a profile piece by piece: plain or gzip, of any size, with the memory of a few MiB.

In comes a path, out come lists of events. The events of a Chrome trace are the list under ``traceEvents``, or the
whole file. A file that ends early, or is something else, is an error that says where; never a shorter answer.

Note [Cutting between events]
A block of text is decoded at once, because that is much faster than event by event. It is cut where ``}, {`` stands.
That may be inside an event or inside a string; but then brackets or quotes are left open before the cut, and the text
before it, put between ``[`` and ``]``, is no JSON. So a cut that can be decoded is a cut between two events.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from piecegraph.errors import InputError
from piecegraph.provenance.profile.event import Decode, ProfileEvent, decode_one, event_of, fastest_decoder
from piecegraph.provenance.profile.saved import MEMBER

BLOCK_BYTES = 1 << 20
MAX_VALUE_CHARS = 1 << 26
"""No event is longer: a broken file must not be searched for its end with all the memory there is."""

_GZIP_MAGIC = b"\x1f\x8b"
_BETWEEN_EVENTS = re.compile(r"\}([ \t\r\n]*,[ \t\r\n]*)\{")
_CUT_SEARCH_CHARS = 1 << 16
_MAX_CUTS_TRIED = 3
_SPACE = re.compile(r"[ \t\r\n]*")
_BEGUN_LITERAL = re.compile(r"[-+.\w]{0,9}")
"""The beginning of a number, of ``true`` or of ``-Infinity``, or nothing."""
_EVENT_NAME = re.compile(r'\{\s*"ph": "\w",\s*"cat": "[^"]*",\s*"name": "((?:(?!"ph": ).)*?)",\s*"pid": ', re.DOTALL)
"""As torch.profiler writes it; no longer than its event."""
_MAX_NAME_CHARS = 1 << 14
_EXPORT_HINT = "give what torch.profiler's export_chrome_trace() wrote, .json or .json.gz"
_CUT_OFF_HINT = (
    "copy it again, or record it again and let the program end by itself: it is written when profiling stops"
)


class ProfileFile:
    """One profile. ``batches()`` may be walked once; the other fields hold what it has met so far.

    Args:
        path: of the file.
        decode: makes events of a list of them; the fastest there is by default.
        make: makes one event of its fields, in the same way.
    """

    def __init__(
        self, path: str, decode: Decode | None = None, make: Callable[[dict[str, Any]], Any] = event_of
    ) -> None:
        self.path = path
        self._make = make
        self.num_events = 0
        self.device_properties: list[dict[str, Any]] = []
        self.saved: dict[str, Any] = {}
        """What :mod:`piecegraph.provenance.profile.saved` wrote."""
        self._decode = decode or fastest_decoder()
        self._text = _Text(iter(()))

    @property
    def num_bytes(self) -> int:
        """The size on disk, 0 where it is not known."""
        return os.path.getsize(self.path) if os.path.isfile(self.path) else 0

    def batches(self, on_bytes: Callable[[int], None] = lambda position: None) -> Iterator[Sequence[ProfileEvent]]:
        """All events, in lists of some thousands; ``on_bytes`` is told how far into the file they reach."""
        with self._open() as raw:
            self._text = _Text(_blocks(raw, on_bytes))
            try:
                yield from self._document()
            except EOFError as error:  # of gzip
                raise self._cut_off() from error
            except (gzip.BadGzipFile, zlib.error) as error:
                raise self._damaged_gzip(error) from error
            except OSError as error:
                raise self._unreadable(error) from error
        if not self.num_events:
            why = "it is JSON, but has no list of traceEvents, or an empty one"
            raise InputError("PG704", "no trace events", where=self.path, why=why, hint=_EXPORT_HINT)

    def _open(self) -> io.BufferedReader:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise self._unreadable(error) from error

    def _document(self) -> Iterator[Sequence[ProfileEvent]]:
        opening = self._text.peek()
        if opening == "":
            raise InputError("PG702", "the trace is empty", where=self.path, hint=_EXPORT_HINT)
        if opening == "[":
            self._text.at += 1
            yield from self._events()
        elif opening == "{":
            self._text.at += 1
            yield from self._members()
        else:
            raise self._not_json("it should begin with { or [")
        if self._text.peek():
            raise self._not_json("there is more behind the end of its JSON")

    def _members(self) -> Iterator[Sequence[ProfileEvent]]:
        """The events, from behind the ``{`` of the file to behind its ``}``."""
        separator = ""
        while self._text.peek() != "}":
            if separator:
                self._expect(separator)
            separator = ","
            if self._text.peek() not in ('"', ""):
                raise self._not_json("a name was expected")
            name = self._value()
            self._expect(":")
            if self._text.peek() == "[" and name == "traceEvents":
                self._text.at += 1
                yield from self._events()
            else:
                value = self._value()
                if name == "deviceProperties" and isinstance(value, list):
                    self.device_properties = [properties for properties in value if isinstance(properties, dict)]
                elif isinstance(name, str) and name.startswith(MEMBER):
                    self.saved[name] = value
        self._text.at += 1

    def _events(self) -> Iterator[Sequence[ProfileEvent]]:
        """From behind the ``[`` of a list of events to behind its ``]``."""
        if self._text.peek() == "]":
            self._text.at += 1
            return
        is_open = True
        while is_open:
            self._text.fill(BLOCK_BYTES)
            batch: Sequence[ProfileEvent] | None = self._many()
            if batch is None:
                batch, is_open = self._one_by_one()
            yield batch

    def _many(self) -> Sequence[ProfileEvent] | None:
        """See Note [Cutting between events]. Ends in front of an event; None if no cut was found."""
        text, start = self._text.text, self._text.at
        cuts = list(_BETWEEN_EVENTS.finditer(text, max(start, len(text) - _CUT_SEARCH_CHARS)))
        for cut in reversed(cuts[-_MAX_CUTS_TRIED:]):
            try:
                batch = self._decode(f"[{text[start : cut.start(1)]}]")
            except (ValueError, RecursionError):
                continue
            self._text.at = cut.end(1)
            self.num_events += len(batch)
            return batch
        return None

    def _one_by_one(self) -> tuple[Sequence[ProfileEvent], bool]:
        """The events up to the end of the window, at least one, and whether the list goes on."""
        batch = [self._object()]
        window_end = len(self._text.text)
        while self._text.peek() == ",":
            self._text.at += 1
            if len(self._text.text) != window_end:
                return batch, True
            batch.append(self._object())
        self._expect("]")
        return batch, False

    def _object(self) -> ProfileEvent:
        if self._text.peek() not in ("{", ""):
            raise self._not_json("an event was expected")
        event: ProfileEvent = self._make(self._value())
        self.num_events += 1
        return event

    def _value(self) -> Any:
        """The value at the current place, however long."""
        while True:
            text = self._text
            try:
                value, end = decode_one(text.text, text.at)
            except (ValueError, RecursionError) as error:
                if text.mend_name():
                    continue
                if len(text.text) - text.at <= MAX_VALUE_CHARS:
                    if text.more():
                        continue
                    if _is_at_the_end(error, text.text):
                        raise self._cut_off() from error
                if isinstance(error, json.JSONDecodeError):
                    text.at = error.pos
                    raise self._not_json(error.msg) from error
                raise self._not_json(str(error)) from error
            # What follows may be the rest of a number.
            if end == len(text.text) and text.more():
                continue
            text.at = end
            return value

    def _expect(self, char: str) -> None:
        found = self._text.peek()
        if found == "":
            raise self._cut_off()
        if found != char:
            raise self._not_json(f"{char!r} was expected")
        self._text.at += 1

    def _place(self, num_bytes: int) -> str:
        return f"byte {num_bytes:,} of {self.path}"

    def _not_json(self, why: str) -> InputError:
        where = self._place(self._text.num_bytes_before())
        return InputError("PG703", "the trace is not JSON", where=where, why=why, hint=_EXPORT_HINT)

    def _cut_off(self) -> InputError:
        why = f"the file ends there, after {self.num_events:,} whole events"
        where = self._place(self._text.num_bytes_seen())
        return InputError("PG705", "the trace is cut off", where=where, why=why, hint=_CUT_OFF_HINT)

    def _damaged_gzip(self, error: Exception) -> InputError:
        why = f"{error}, after {self.num_events:,} events"
        hint = "copy it again; gzip -t tells whether the file is whole"
        where = self._place(self._text.num_bytes_seen())
        return InputError("PG706", "the trace is a damaged gzip file", where=where, why=why, hint=hint)

    def _unreadable(self, error: OSError) -> InputError:
        why = error.strerror or str(error)
        return InputError("PG701", "the trace cannot be read", where=self.path, why=why, hint=_EXPORT_HINT)


class _Text:
    """A window of the file's text, and how far it is read."""

    def __init__(self, blocks: Iterator[str]) -> None:
        self._blocks = blocks
        self.text = ""
        self.at = 0
        self._num_dropped_bytes = 0

    def num_bytes_before(self) -> int:
        """How many bytes of the (unpacked) file lie before the current place."""
        return self._num_dropped_bytes + _num_bytes(self.text[: self.at])

    def num_bytes_seen(self) -> int:
        """How many bytes of the (unpacked) file were read at all."""
        return self._num_dropped_bytes + _num_bytes(self.text)

    def more(self) -> bool:
        """Add a block, let go of what was read, and tell whether there was a block."""
        added = next(self._blocks, None)
        if added is None:
            return False
        # At least as much as is there already: a value over many blocks must not be parsed once for each.
        parts, num_chars = [self.text[self.at :], added], len(added)
        while num_chars < len(parts[0]) and (added := next(self._blocks, None)) is not None:
            parts.append(added)
            num_chars += len(added)
        self._num_dropped_bytes = self.num_bytes_before()
        self.text, self.at = "".join(parts), 0
        return True

    def fill(self, num_chars: int) -> None:
        """Hold that many unread characters, if the file has them."""
        while len(self.text) - self.at < num_chars and self.more():
            pass

    def mend_name(self) -> bool:
        """Escape the name of the event at the current place; False if there is nothing to escape.

        torch.profiler escapes no names of Python functions, and the code of a module that was imported meanwhile has
        gone when its name is read: anything may stand there.
        """
        found = _EVENT_NAME.match(self.text, self.at, self.at + _MAX_NAME_CHARS)
        if found is None or _is_string(f'"{found[1]}"'):
            return False
        escaped = json.dumps(found[1], ensure_ascii=False)[1:-1]
        self._num_dropped_bytes -= len(escaped) - len(found[1])
        self.text = self.text[: found.start(1)] + escaped + self.text[found.end(1) :]
        return True

    def peek(self) -> str:
        """The next character that is no white space, which becomes the current place; empty at the end."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""


def _blocks(raw: io.BufferedReader, on_bytes: Callable[[int], None]) -> Iterator[str]:
    """The file's text. Bytes that are no UTF-8, which profilers let slip into names, are replaced."""
    is_gzip = raw.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
    unpacked: IO[bytes] | gzip.GzipFile = gzip.GzipFile(fileobj=raw) if is_gzip else raw
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    while block := unpacked.read(BLOCK_BYTES):
        yield decoder.decode(block)
        if raw.seekable():
            on_bytes(raw.tell())
    yield decoder.decode(b"", final=True)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _is_string(text: str) -> bool:
    try:
        return decode_one(text, 0)[1] == len(text)
    except ValueError:
        return False


def _is_at_the_end(error: Exception, text: str) -> bool:
    """Whether a value could not be parsed because the text ends in it."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    is_open_string = error.msg.startswith("Unterminated string")
    return is_open_string or _BEGUN_LITERAL.fullmatch(text[error.pos :].strip()) is not None
