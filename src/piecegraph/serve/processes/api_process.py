"""An API process, from its start to its end. See Note [API processes]."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

import transformers.processing_utils  # noqa: F401 - what reads a tokenizer, imported once for all that are forked

from piecegraph.serve.http_server import ApiServer, loop_factory
from piecegraph.serve.processes.api_side import Engine, RemoteModels
from piecegraph.serve.processes.link import Link, Message
from piecegraph.serve.record import log_to_stderr
from piecegraph.serve.settings import ServeSettings

logger = logging.getLogger(__name__)

_LOST = 1
_LAST_WORDS_S = 5
"""How long clients have to read that the engine is gone."""


def run(number: int, listening: socket.socket, connected: socket.socket, settings: ServeSettings, logs: bool) -> None:
    """Serve until the engine's process says otherwise.

    Args:
        number: of this process among them.
        listening: where clients connect.
        connected: to the engine's process.
        settings: of the server.
        logs: whether requests are written to standard error.
    """
    for each in (signal.SIGINT, signal.SIGTERM):  # they are sent to all processes, and the engine's decides
        signal.signal(each, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if logs:
        log_to_stderr()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        is_lost = runner.run(ApiProcess(settings, Link(connected)).serve_on(listening))
    if is_lost and number == 0:
        logger.error("the engine's process is gone; its requests were ended, and so is the server")
    os._exit(_LOST if is_lost else 0)  # what was inherited is not ours to tidy up


class ApiProcess:
    """The application, over a catalog that asks the engine's process."""

    def __init__(self, settings: ServeSettings, link: Link) -> None:
        self._link = link
        self._engine = Engine(link)
        self._models = RemoteModels(settings, self._engine)
        self._server = ApiServer(self._models)
        self._may_accept = asyncio.Event()
        """Behind what is said of models at first: one that takes the place of another has them before its clients."""

    async def serve_on(self, listening: socket.socket) -> bool:
        """True if the engine's process has gone meanwhile."""
        self._link.listen(self._receive, self._end)
        await self._may_accept.wait()
        await self._models.read()
        self._engine.post("up")
        await self._server.serve(sockets=[listening])
        return self._engine.is_gone

    def _receive(self, message: Message) -> None:
        kind, *rest = message
        if kind == "model":
            self._models.set_model(*rest)
        elif kind == "forget":
            self._models.forget(*rest)
        elif kind == "accept":
            self._may_accept.set()
        elif kind == "drain":
            self._server.should_exit = True
        else:
            self._engine.receive(message)

    def _end(self) -> None:
        self._engine.end()
        self._may_accept.set()
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._give_up)

    def _give_up(self) -> None:
        self._server.force_exit = True
