"""What became of a request: the bytes of an HTTP answer come in, and an :class:`Answer` goes out.

The one invariant: an event costs little while it comes. It is looked at as bytes, and only one that does not simply
carry a text is read as JSON, so that one process can follow many streams, and moments are not late.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_HAS_TEXT = re.compile(rb'"text":\s*"(?!")')
"""An event with a text that is not empty. Within a JSON string the quotes would have backslashes."""
_HAS_MORE = re.compile(rb'"usage":\s*\{|"error":\s*[^n\s]')
"""An event that has to be read, too: these say null elsewhere."""
_MOST_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request."""

    status: str
    """``200``, another status of HTTP, or what broke the connection."""
    times_s: tuple[float, ...] = ()
    """When each part of the answer came, counted from when it was asked for."""
    num_prompt: int = 0
    num_new: int = 0

    @property
    def is_whole(self) -> bool:
        return self.status == "200"


class AnswerReader:
    """Reads one answer: an HTTP/1.1 head, and a stream of events behind it.

    Args:
        start_s: when it was asked for, by the clock of :meth:`feed`.
    """

    def __init__(self, start_s: float) -> None:
        self.answer: Answer | None = None
        """As soon as it is known."""
        self._start_s = start_s
        self._read: Callable[[bytes, float], bytes] = self._read_head
        self._rest, self._line = b"", b""
        self._num_left = 0
        self._times: list[float] = []
        self._usage: dict[str, Any] = {}

    def feed(self, data: bytes, now_s: float) -> None:
        """More bytes have come.

        Raises:
            http.client.HTTPException: they are no such answer.
        """
        before = None
        data = self._rest + data
        while self.answer is None and data and before is not self._read:  # a head has a body behind it
            before = self._read
            data = self._read(data, now_s)
        self._rest = data

    def end(self) -> None:
        """Nothing more comes.

        Raises:
            http.client.HTTPException: there should have.
        """
        if self.answer is None:
            if self._read == self._read_head:
                raise http.client.RemoteDisconnected("no answer")
            raise http.client.IncompleteRead(b"")

    def _read_head(self, data: bytes, now_s: float) -> bytes:
        """What follows the head, or all of it while that is not whole."""
        head, separator, body = data.partition(b"\r\n\r\n")
        if len(head) > _MOST_HEAD_BYTES:
            raise http.client.LineTooLong("header")
        if not separator:
            return data
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            raise http.client.BadStatusLine(first)
        if words[1].startswith("1"):  # goes on, a real head follows
            return self._read_head(body, now_s)
        if words[1] != "200":
            self.answer = Answer(status=words[1])
            return b""
        headers = {name.lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            self._read = self._read_chunks
        elif headers.get("content-length", "").isdecimal():
            self._num_left, self._read = int(headers["content-length"]), self._read_counted
        else:
            self._read = self._read_lines
        return body

    def _read_chunks(self, data: bytes, now_s: float) -> bytes:
        place = 0
        while (end_of_size := data.find(b"\r\n", place)) >= 0 and self.answer is None:
            try:
                size = int(data[place:end_of_size].partition(b";")[0], 16)
            except ValueError as error:
                raise http.client.IncompleteRead(b"") from error
            if size == 0:
                self.end()
            start, end = end_of_size + 2, end_of_size + 2 + size
            if len(data) < end + 2:
                break
            self._read_lines(data[start:end], now_s)
            place = end + 2
        return data[place:]

    def _read_counted(self, data: bytes, now_s: float) -> bytes:
        self._num_left -= len(data)
        self._read_lines(data, now_s)
        if self._num_left <= 0:
            self.end()
        return b""

    def _read_lines(self, data: bytes, now_s: float) -> bytes:
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and self.answer is None:
                self._read_event(line[5:], now_s)
        return b""

    def _read_event(self, event: bytes, now_s: float) -> None:
        if _HAS_TEXT.search(event) and not _HAS_MORE.search(event):
            self._times.append(now_s - self._start_s)
        elif event.strip() == b"[DONE]":
            self.answer = self._whole()
        else:
            self._read_document(event, now_s)

    def _read_document(self, event: bytes, now_s: float) -> None:
        try:
            document = json.loads(event)
        except ValueError as error:
            raise http.client.HTTPException("no JSON") from error
        if not isinstance(document, dict):
            raise http.client.HTTPException("no object")
        if document.get("error"):
            self.answer = Answer(status="error in the stream", times_s=tuple(self._times))
            return
        choices = document.get("choices") or ()
        # The last part may hold nothing but why it ended; if it is the only one, no token before it had a text.
        if any(choice.get("text") for choice in choices) or (choices and not self._times):
            self._times.append(now_s - self._start_s)
        self._usage = document.get("usage") or self._usage

    def _whole(self) -> Answer:
        if not self._times:
            return Answer(status="no answer")
        return Answer(
            status="200",
            times_s=tuple(self._times),
            num_prompt=int(self._usage.get("prompt_tokens", 0)),
            num_new=int(self._usage.get("completion_tokens", len(self._times))),
        )
