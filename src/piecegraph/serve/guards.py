"""What every request passes: its record, its key, the host it names, its size and the pace of its body.

Note [Pages of other sites]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A server that only this machine reaches may do without a key. But a browser on this machine runs pages of others, and
whoever owns a name can have it resolve to 127.0.0.1: to the browser, the server is then a part of that site. What such
a request cannot change is the name in its Host header.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from piecegraph.serve.failures import ApiError
from piecegraph.serve.record import Record
from piecegraph.serve.service import Counts
from piecegraph.serve.settings import ServeSettings, is_loopback
from piecegraph.serve.streams import Json

_BODY_S = 30
"""Seconds in which a body must come,"""
_LEAST_BYTES_PER_S = 2**14
"""and what has come of it buys further ones, so that no client holds on for long with a few bytes."""

MOST_HEAD_BYTES = 2**16
"""Of a request's first line and its headers."""

BROKEN_OFF = "piecegraph.broken_off"
"""In the state of a request: what is wrong with its body. See Note [Bodies that are broken off] in ``protocol.py``."""

_OPEN = ("/health", "/ready", "/")
"""What asks for no key: those who restart a server have none, and a browser asks for the page before it has one."""


_OF_ADMINS = "/v1/models/"
"""What may be posted below it changes the server for everybody."""


class Guards:
    """Around the application.

    Args:
        app: what answers.
        settings: limits and keys.
        metrics: where answers are counted.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Counts) -> None:
        self._app = app
        self._max_bytes = settings.max_body_bytes
        self._metrics = metrics
        self._is_for_this_machine = settings.is_for_this_machine
        self._digests = tuple(_digest(key) for key in settings.api_keys)
        self._admin_digests = tuple(_digest(key) for key in settings.admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        named = {"id": scope["request_id"]} if "request_id" in scope else {}  # by a front that passes it on
        record = Record(scope["method"], scope["path"], client[0] if client else "", **named)
        scope["record"], scope["send"] = record, send

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            error = self._refusal(scope, Headers(scope=scope))
            if error is None:
                await self._app(scope, _counted(receive, scope, self._max_bytes), send_noted)
            else:
                record.error = error.message
                response = Json(error.body(scope["path"]), error.status, error.headers)
                await response(scope, receive, send_noted)
        finally:
            self._metrics.count_response(record.status)
            record.write()

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if _head_bytes(scope) > MOST_HEAD_BYTES:
            return head_too_large()
        if self._is_for_this_machine and not all(map(_names_this_machine, headers.getlist("host"))):
            message = "without an API key, only requests to localhost are answered: the Host header names another"
            return ApiError(403, message, code="host_not_allowed")
        if scope["method"] == "POST" and scope["path"].startswith(_OF_ADMINS):
            if not self._admin_digests:
                return ApiError(403, "models are loaded and unloaded only where there is an admin key", code="no_admin")
            if not _has_key(headers, self._admin_digests):
                return ApiError(401, "the admin key is missing or wrong", code="invalid_api_key")
        elif self._digests and scope["path"] not in _OPEN and not _has_key(headers, self._digests):
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            return _too_large(self._max_bytes)
        return None


def _head_bytes(scope: Scope) -> int:
    """As many as came, however they came: with what stands between a name, its value and the next name."""
    query = scope.get("query_string", b"")
    target = len(scope.get("raw_path") or scope["path"]) + len(query) + bool(query)
    others = len(f"{scope['method']}  HTTP/1.1\r\n\r\n")
    return target + others + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])


def head_too_large() -> ApiError:
    """What a client is told, also by who has not seen the end of its headers yet."""
    return ApiError(431, f"the headers are larger than {MOST_HEAD_BYTES} bytes", code="headers_too_large")


def _has_key(headers: Headers, known: Sequence[bytes]) -> bool:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return _is_one_of(_digest(given), known)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_one_of(given: bytes, known: Sequence[bytes]) -> bool:
    """Compared with all of them, and whole: how long it takes says nothing."""
    return sum(hmac.compare_digest(given, each) for each in known) > 0


def _names_this_machine(host: str) -> bool:
    """Whether a Host header does. See Note [Pages of other sites].

    >>> [_names_this_machine(host) for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "localhost.example")]
    [True, True, True, False]
    """
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _counted(receive: Receive, scope: Scope, max_bytes: int) -> Receive:
    """The same, but no body is longer than it may be, whatever its header said, and none is waited for too long, nor
    at all where it is broken off.
    """
    num_bytes, is_whole, begun = 0, False, time.monotonic()

    async def receive_counted() -> Message:
        nonlocal num_bytes, is_whole
        left_s = begun + _BODY_S + num_bytes / _LEAST_BYTES_PER_S - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), None if is_whole else left_s)
        except TimeoutError as error:
            raise HTTPException(408, f"{num_bytes} bytes of the body have come, which is too slow") from error
        if (broken_off := scope.get("state", {}).get(BROKEN_OFF)) is not None:
            raise HTTPException(broken_off.status, broken_off.message) from broken_off
        is_whole = not message.get("more_body", False)
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise HTTPException(413, _too_large(max_bytes).message)
        return message

    return receive_counted


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
