"""What a server of one process and one of several have in common: models, readiness, signals and the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.listening import address_of
from piecegraph.serve.models import Models


class ModelServer(ABC):
    """A server, with the models it serves. A signal lets it end, and is no reason to die of it afterwards.

    Args:
        models: which.
    """

    def __init__(self, models: Models) -> None:
        self.models = models
        self.should_exit = self.force_exit = False

    @abstractmethod
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer whoever connects until it should exit, and then until all that was accepted is answered."""

    async def serve_models(
        self, listening: Sequence[socket.socket], specs: Sequence[ModelSpec], on_ready: Callable[[str], None]
    ) -> bool:
        """Serve models from when they are loaded; False if a signal came before.

        Args:
            listening: sockets of the server's address.
            specs: the models that are loaded first.
            on_ready: called with the address once they are there.
        """
        loading = asyncio.ensure_future(self.models.begin(specs))

        def begin(done: asyncio.Future[None]) -> None:
            if done.exception() is not None:
                self.should_exit = True
            else:
                on_ready(address_of(listening[0]))

        loading.add_done_callback(begin)
        await self.serve(sockets=list(listening))
        if not loading.done():
            loading.remove_done_callback(begin)
            loading.cancel()
            return False
        await self.models.end()
        loading.result()
        return True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.models.drain()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
