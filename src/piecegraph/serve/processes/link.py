"""One end of a connection between two processes of a server: messages in both directions, whole and in order.

A message is a tuple of plain values, as ``marshal`` has them: it is the quickest that Python comes with, and reading it
makes nothing but such values. Both ends are the same program, and nobody else has them.
"""

from __future__ import annotations

import asyncio
import marshal
import socket
import threading
from collections.abc import Callable
from typing import Any

Message = tuple[Any, ...]

_HEAD_BYTES = 8
_READ_BYTES = 2**18


class Link:
    """An end.

    Args:
        connected: a socket whose other end is in another process.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mutex = threading.Lock()
        """Held for a moment by those who send."""
        self._unsent = bytearray()
        self._is_open = True
        self._posted: list[Message] = []
        self._received = bytearray()
        self._on_message: Callable[[Message], None]
        self._on_end: Callable[[], None]

    def listen(self, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        """Have the running event loop call these with what comes, and when nothing will come any more."""
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_end = on_message, on_end
        self._loop.add_reader(self._socket, self._read)

    def send(self, *messages: Message) -> bool:
        """Send at once, from any thread, and without waiting; False if the other end is gone."""
        data = marshal.dumps(messages)
        frame = len(data).to_bytes(_HEAD_BYTES, "little") + data
        with self._mutex:
            if not self._is_open:
                return False
            if self._unsent:
                self._unsent += frame
                return True
            num_sent = self._try(frame)
            if num_sent < len(frame):
                self._unsent += memoryview(frame)[num_sent:]
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._write_later)
        return True

    def post(self, message: Message) -> None:
        """Send with others of this turn of the event loop, from its thread."""
        if not self._posted:
            assert self._loop is not None
            self._loop.call_soon(self._send_posted)
        self._posted.append(message)

    def close(self) -> None:
        with self._mutex:
            if not self._is_open:
                return
            self._is_open = False
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()

    def _send_posted(self) -> None:
        posted, self._posted = self._posted, []
        self.send(*posted)

    def _try(self, data: bytes | bytearray) -> int:
        """How much the system takes. Of an end that is gone, the reader is told."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return len(data)

    def _write_later(self) -> None:
        if self._is_open and self._loop is not None:
            self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        with self._mutex:
            del self._unsent[: self._try(self._unsent)]
            if not self._unsent and self._loop is not None:
                self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._on_end()
            return
        self._received += data
        for messages in self._frames():
            for message in messages:
                self._on_message(message)

    def _frames(self) -> list[tuple[Message, ...]]:
        """Those that are whole."""
        found, start, received = [], 0, self._received
        while len(received) - start >= _HEAD_BYTES:
            begin = start + _HEAD_BYTES
            end = begin + int.from_bytes(received[start:begin], "little")
            if end > len(received):
                break
            found.append(marshal.loads(memoryview(received)[begin:end]))
            start = end
        if start:
            self._received = received[start:]
        return found
