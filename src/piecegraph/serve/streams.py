"""Answers that are sent while they are made, and clients that go away meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from piecegraph.serve.failures import ApiError

Found = TypeVar("Found")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_ENDS_OF_LINES = str.maketrans({mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"})
"""What JSON lets stand as it is, and ends a line for ``str.splitlines``, with which many clients read events."""


class Json(JSONResponse):
    """An answer in one. A client may have sent half a character, and be told of it: it is escaped, as it came."""

    def render(self, content: Any) -> bytes:
        return _as_bytes(content)


def _as_bytes(data: Any) -> bytes:
    text = _encode(data)
    try:
        return (text if text.isascii() else text.translate(_ENDS_OF_LINES)).encode()
    except UnicodeEncodeError:
        return json.dumps(data).encode()


def event(data: Any, name: str | None = None) -> bytes:
    """One event of a stream."""
    text = b"data: " + _as_bytes(data) + b"\n\n"
    return f"event: {name}\n".encode() + text if name else text


class Template:
    """Events that differ in one text, of which there is one a token: all but that text is written once.

    Args:
        data: an event with ``HOLE`` in the place of the text.

    >>> print(Template({"choices": [{"index": 0, "text": HOLE}]}).event("so").decode().rstrip())
    data: {"choices":[{"index":0,"text":"so"}]}
    """

    def __init__(self, data: Any) -> None:
        self._before, self._behind = event(data).split(_as_bytes(HOLE))

    def event(self, text: str) -> bytes:
        return self._before + _as_bytes(text) + self._behind


HOLE = "\u0001the text\u0001"
"""What no name of a model and no id holds."""


class EventStream(Response):
    """Server-sent events. When the client goes away, what makes them is closed.

    A client that reads slowly is waited for, and nothing is made meanwhile.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            is_whole = await _unless_gone(receive, self._send_all(scope.get("send", send)))
            if not is_whole:
                scope["record"].is_cut = True
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> bool:
        """What has begun concerns nobody between here and the connection, and there is an event a token."""
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def while_connected(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """Do something for a client, and stop if it goes away."""
    found = await _unless_gone(request.receive, work)
    if found is None:
        request.scope["record"].is_cut = True
        raise ApiError(499, "the client went away")
    return found


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Found]) -> Found | None:
    """What comes of it; None if the client went away first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _stopped(task)
        await _stopped(gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stopped(task: Awaitable[Any]) -> None:
    if isinstance(task, asyncio.Future) and not task.done():
        task.cancel()
        await asyncio.wait((task,))
