"""From settings to a server that answers from its first second on: it listens, loads, serves, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import uvicorn

from piecegraph.errors import CommandError
from piecegraph.serve.app import make_app
from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.models import Load, Models
from piecegraph.serve.protocol import HttpProtocol
from piecegraph.serve.settings import ServeSettings

_BACKLOG = 2048
_KEEP_ALIVE_S = 65
"""Longer than the clients' own pools keep a connection: whoever closes first must not be the one who listens."""


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
        CommandError: PG614, the address cannot be listened at.
        PiecegraphError: what ``load`` raised.
    """
    with listen(settings.host, settings.port) as listening, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(HttpServer(Models(settings, load)).serve_models(listening, specs, on_ready))


class HttpServer(uvicorn.Server):
    """uvicorn's, which stops accepting and lets connections end. A signal is no reason to die of it afterwards."""

    def __init__(self, models: Models) -> None:
        self.models = models
        super().__init__(
            uvicorn.Config(
                make_app(models),
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=models.settings.drain_s,  # type: ignore[arg-type] # it is waited for as it is
            )
        )

    async def serve_models(
        self, listening: socket.socket, specs: Sequence[ModelSpec], on_ready: Callable[[str], None]
    ) -> bool:
        """See :func:`serve`."""
        loading = asyncio.ensure_future(self.models.begin(specs))

        def begin(done: asyncio.Future[None]) -> None:
            if done.exception() is not None:
                self.should_exit = True
            else:
                on_ready(address_of(listening))

        loading.add_done_callback(begin)
        await self.serve(sockets=[listening])
        if not loading.done():
            loading.remove_done_callback(begin)
            loading.cancel()
            return False
        await self.models.end()
        loading.result()
        return True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.models.drain()
        super().handle_exit(sig, frame)

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


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to already."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(_BACKLOG)
            stack.pop_all()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise CommandError(
            "PG614", f"{host}:{port} cannot be listened at", why=why, hint="choose another --port"
        ) from error
    return found


def address_of(listening: socket.socket) -> str:
    """Where clients find it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return None
    return uvloop.new_event_loop
