"""Connections whose requests come too slowly, never end or are none: uvicorn waits for the rest as long as it takes.

Note [Bodies that are broken off]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Behind its headers, a request is at its endpoint or waits for those before it, and is answered in its turn and in the
shape of its API. So the endpoint is told what is wrong with the body, by way of :func:`piecegraph.serve.guards.Guards`,
which reads bodies for it, and the connection ends with the answer. One that does not read the body answers as ever.

Note [Other protocols]
~~~~~~~~~~~~~~~~~~~~~~
A client may ask for another protocol in passing (``Upgrade: h2c``, as Java's does by default), and a server that has
none goes on as if it had not. But httptools takes everything behind such headers for the other protocol, so that the
body would be lost. A second parser reads on: it is first given a head that tells how long the body is, and no more.

Note [Clients that know no chunks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before HTTP/1.1 an answer whose length is not told ends with the connection. uvicorn sends it in chunks to anybody; and
without them it takes what was not announced for too long, so that the length is announced part by part. Nor is such a
client asked for its body: it would take the question for the answer.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from piecegraph.serve.failures import ApiError
from piecegraph.serve.guards import BROKEN_OFF, MOST_HEAD_BYTES, head_too_large

_HEAD_S = 30
"""Seconds in which the headers of a request must come."""
_LINGER_S = 5
"""Seconds in which the rest of a body that was refused is let in: a client that still writes does not read."""

_NO_HTTP = "Invalid HTTP request received."
"""In uvicorn's words."""


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's, with a time and a size for headers. Its own timer is stopped by every byte; this one is not."""

    _timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _num_head_bytes = 0
    _is_reading_on = False
    """Whether the second parser is given its head."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_within(_HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._num_head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.logger.warning(_NO_HTTP)
            self.send_400_response(_NO_HTTP)
        if self._is_in_head and self._num_head_bytes > MOST_HEAD_BYTES:  # those that end are measured by the guards
            self._refuse(head_too_large())

    def eof_received(self) -> bool:  # type: ignore[override] # uvicorn's lets the connection end
        """A client that has sent all of a request has gone; one that has not may wait to be told."""
        if self._is_in_head or self._is_in_body:
            self.send_400_response("the connection has ended before the request")
            return self._is_answering
        return False

    def _parse(self, data: bytes) -> None:
        """uvicorn's would drop what is behind a wish for another protocol. See Note [Other protocols]."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as other:
                lengths = [each for each in self.headers if each[0] in (b"content-length", b"transfer-encoding")]
                self.parser = httptools.HttpRequestParser(self)
                self._is_reading_on = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(b"%s: %s\r\n" % each for each in lengths))
                self._is_reading_on = False
                data = data[other.args[0] :]
            else:
                return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self._expect_within(_HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # those behind a body are nobody's, and have no limit
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._expect_nothing()
        if not self._is_reading_on:
            super().on_headers_complete()
            if self.scope["http_version"] < "1.1":
                _send_without_chunks(self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        if self.cycle.response_complete:
            self._expect_within(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self._is_in_head:  # otherwise there is another request
            self._expect_within(_LINGER_S if self.cycle.more_body else self.timeout_keep_alive)

    def _expect_within(self, seconds: float) -> None:
        self._expect_nothing()
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._is_in_head or self._is_answering:
            self._refuse(ApiError(408, f"the headers have not come in {_HEAD_S} seconds", code="timeout"))
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_in_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, of what cannot be read: a path that is longer than headers may be is none for its parser."""
        error = ApiError(400, msg, code="invalid_http")
        if not self._is_in_body or self._is_in_head:
            is_large = len(getattr(self, "url", b"")) >= MOST_HEAD_BYTES
            self._refuse(head_too_large() if is_large else error)
        elif self._is_answering:  # see Note [Bodies that are broken off]
            self.cycle.keep_alive = False
            self.cycle.scope["state"][BROKEN_OFF] = error
            self.cycle.message_event.set()
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Tell what is wrong with headers. Which API they are for is not known yet: the shape is OpenAI's."""
        if self._is_answering:
            self.cycle.keep_alive = False  # it is answered; what was begun behind it is not
            self.flow.pause_reading()
            return
        body = json.dumps(error.body("")).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head.encode() + body)
        self.transport.close()


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """What has not been answered yet. See Note [Clients that know no chunks]."""
    cycle.keep_alive = cycle.chunked_encoding = cycle.waiting_for_100_continue = False
    send = cycle.send

    async def send_plain(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign] # uvicorn has no setting for it
