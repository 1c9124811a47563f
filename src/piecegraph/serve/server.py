"""From settings to a server that answers from its first second on: it listens, loads, serves, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.http_server import ApiServer, loop_factory
from piecegraph.serve.listening import listen_all
from piecegraph.serve.model_server import ModelServer
from piecegraph.serve.models import Load, Models
from piecegraph.serve.processes.engine_side import EngineServer
from piecegraph.serve.settings import ServeSettings


def serve(settings: ServeSettings, specs: Sequence[ModelSpec], load: Load, *, on_ready: Callable[[str], None]) -> bool:
    """Serve until a signal comes, and then until all that was accepted is answered.

    Args:
        settings: see there.
        specs: the models that are loaded first.
        load: makes a model. It is called on another thread.
        on_ready: called with the address once these models are there.

    Returns:
        Whether they were: otherwise the signal came before, and a thread is still loading one.

    Raises:
        CommandError: PG614, the address cannot be listened at; PG617, API processes end by themselves.
        PiecegraphError: what ``load`` raised.
    """
    with contextlib.ExitStack() as stack:
        listening = listen_all(settings.host, settings.port, settings.api_processes or 1)
        for each in listening:
            stack.enter_context(each)
        runner = stack.enter_context(asyncio.Runner(loop_factory=loop_factory()))
        return runner.run(make_server(Models(settings, load)).serve_models(listening, specs, on_ready))


def make_server(models: Models) -> ModelServer:
    """A server of one process, or of several: see Note [API processes]."""
    return EngineServer(models) if models.settings.api_processes else HttpServer(models)


class HttpServer(ModelServer, ApiServer):
    """A server of one process."""

    def __init__(self, models: Models) -> None:
        ModelServer.__init__(self, models)
        ApiServer.__init__(self, models)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await ApiServer.serve(self, sockets)
