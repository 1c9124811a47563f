"""The front: what every request passes before it is passed on to an engine, and again if that engine is lost."""

from __future__ import annotations

import os
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from piecegraph.serve.failures import ApiError
from piecegraph.serve.guards import Guards
from piecegraph.serve.metrics import Metrics
from piecegraph.serve.ray.passed_on import PassedOn, beginning_of
from piecegraph.serve.record import Record, log_to_stderr
from piecegraph.serve.settings import ServeSettings
from piecegraph.serve.streams import Json, event

_MOST_ATTEMPTS = 3
_READ = ("/health", "/ready", "/version", "/openapi.json", "/v1/models")
"""What may be asked for by GET: it is the same of every replica. Numbers of each are among Ray's own metrics."""


class Front:
    """What Ray's proxies send requests to.

    Args:
        engines: a handle of the engines.
        settings: fields of :class:`ServeSettings`; keys come from ``PIECEGRAPH_API_KEY``, where whoever may read Ray's
            configuration does not find them.
    """

    def __init__(self, engines: Any, settings: dict[str, Any]) -> None:
        keys = tuple(os.environ.get("PIECEGRAPH_API_KEY", "").split())
        log_to_stderr()
        self._app = Guards(PassOn(engines), ServeSettings(**settings, api_keys=keys), Metrics())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


class PassOn:
    """An application that has requests answered by engines."""

    def __init__(self, engines: Any) -> None:
        self._engines = engines.options(stream=True, method_name="answer")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # of its own life there is nothing to do
            await Router()(scope, receive, send)
            return
        record: Record = scope["record"]
        try:
            request = await _read(scope, receive)
            answer = _Answer(request, send)
            await self._have_answered(request, answer, record)
        except ApiError as error:
            record.error = error.message
            await Json(error.body(scope["path"]), error.status, error.headers)(scope, receive, send)

    async def _have_answered(self, request: PassedOn, answer: _Answer, record: Record) -> None:
        """Raises what the client is told, as long as it was told nothing."""
        for _ in range(_MOST_ATTEMPTS):
            messages = self._engines.remote(request)
            try:
                async for some in messages:
                    await answer.send(some)
                return
            except BackPressureError as error:
                raise ApiError(429, "as many requests wait as may", code="queue_full") from error
            except (RayError, DeploymentUnavailableError) as error:
                if answer.has_begun:
                    record.cut("the engine was lost in the middle of the answer")
                    await answer.break_off()
                    return
                if not isinstance(error, (RayActorError, DeploymentUnavailableError)):  # it would fail again
                    raise ApiError(500, f"the engine failed: {type(error).__name__}", code="engine_error") from error
            finally:
                messages.cancel()
        raise ApiError(503, f"the request was lost with {_MOST_ATTEMPTS} engines", code="engine_lost")


class _Answer:
    """What a client was told so far."""

    def __init__(self, request: PassedOn, send: Send) -> None:
        self._request, self._send = request, send
        self.has_begun = False
        self._is_stream = False

    async def send(self, messages: list[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                # Its id was given by the front, which says so by itself.
                message["headers"] = [each for each in message["headers"] if each[0] != b"x-request-id"]
                self._is_stream = (b"content-type", b"text/event-stream") in _kinds(message)
            self.has_begun = True
            await self._send(message)

    async def break_off(self) -> None:
        """End a stream with an error. An answer in one that has begun is whole, or its connection is cut."""
        if not self._is_stream:
            raise ConnectionResetError("an answer was cut")
        path = self._request.path
        error = ApiError(500, "the engine was lost in the middle of the answer", code="engine_lost")
        told = event(error.body(path), "error" if path.startswith("/v1/messages") else None)
        if path == "/v1/responses":
            told = event({"type": "error", "code": error.code, "message": error.message, "param": None}, "error")
        elif not path.startswith("/v1/messages"):
            told += b"data: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": told, "more_body": False})


def _kinds(start: Message) -> list[tuple[bytes, bytes]]:
    return [(name, value.partition(b";")[0]) for name, value in start["headers"]]


async def _read(scope: Scope, receive: Receive) -> PassedOn:
    path, method = scope["path"], scope["method"]
    if method == "GET" and not path.startswith(_READ):
        raise ApiError(404, f"there is nothing at {path}", code="not_found")
    request = Request(scope, receive)
    body = await request.body()
    content_type = request.headers.get("content-type", "").encode("latin-1")
    query: bytes = scope["query_string"]
    return PassedOn(scope["record"].id, method, path, query, content_type, body, beginning_of(body))
