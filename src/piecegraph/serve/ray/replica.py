"""An engine behind a front: the application of ``piecegraph serve`` without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ray.serve.metrics import Gauge
from starlette.types import Message, Scope

from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.serve.app import make_app
from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.models import Models
from piecegraph.serve.ray.passed_on import PassedOn
from piecegraph.serve.settings import ServeSettings

_END: Message = {}


class EngineReplica:
    """One replica of a model.

    Args:
        model_name: what requests call it.
        path: of the model.
        settings: fields of :class:`ServeSettings`. Keys are the front's business.
        arguments: of :class:`~piecegraph.AsyncLLM`.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, model_name: str, path: str, settings: dict[str, Any], arguments: dict[str, Any]
    ) -> None:
        self._models = Models(ServeSettings(**settings), lambda spec: AsyncLLM(spec.path, **arguments))
        self._app = make_app(self._models)
        texts = {"running": "Requests in the batch.", "waiting": "Requests that wait for a place in it."}
        self._gauges = {
            name: Gauge(f"piecegraph_requests_{name}", text, ("model_name",)) for name, text in texts.items()
        }
        await self._models.begin([ModelSpec(name=model_name, path=path)])

    async def check_health(self) -> None:
        """Ray asks from time to time, and replaces a replica for which this raises."""
        is_well, word = self._models.health
        if not is_well:
            raise RuntimeError(f"the engine is {word}")
        for service in self._models.all():
            load = self._models.llm_of(service.name).load()
            self._gauges["running"].set(load.num_running, {"model_name": service.name})
            self._gauges["waiting"].set(load.num_waiting, {"model_name": service.name})

    async def answer(self, request: PassedOn) -> AsyncGenerator[list[Message], None]:
        """What the application sends. Nothing is told before there is a token: until then another replica can answer
        in its place.
        """
        scope, sent = _scope(request), asyncio.Queue[Message]()
        bodies = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if not bodies:
                await asyncio.get_running_loop().create_future()  # whoever has gone away cancels all of this
            return bodies.pop()

        async def run() -> None:
            try:
                await self._app(scope, receive, sent.put)
            finally:
                sent.put_nowait(_END)

        task, held, is_whole = asyncio.ensure_future(run()), list[Message](), False
        try:
            while not is_whole:
                held.append(await sent.get())
                while not sent.empty():
                    held.append(sent.get_nowait())
                is_whole = held[-1] is _END
                if is_whole or scope["record"].has_begun:
                    yield [message for message in held if message is not _END]
                    held = []
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _scope(request: PassedOn) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "scheme": "http",
        "headers": [(b"content-type", request.content_type)] if request.content_type else [],
        "client": None,
        "server": None,
        "request_id": request.id,
    }
