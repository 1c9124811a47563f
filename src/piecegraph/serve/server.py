"""From settings to a server that answers from its first second on: it listens, loads, serves, and drains."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from piecegraph.errors import CommandError
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.serve.app import make_app
from piecegraph.serve.protocol import HttpProtocol
from piecegraph.serve.service import Service
from piecegraph.serve.settings import ServeSettings

_BACKLOG = 2048
_KEEP_ALIVE_S = 65
"""Longer than the clients' own pools keep a connection: whoever closes first must not be the one who listens."""


def serve(settings: ServeSettings, load: Callable[[], AsyncLLM], *, on_ready: Callable[[str], None]) -> bool:
    """Serve until a signal comes, and then until all that was accepted is answered.

    Args:
        settings: see there.
        load: makes the model. It is called on another thread.
        on_ready: called with the address once the model is there.

    Returns:
        Whether the model was there: otherwise the signal came before, and a thread is still loading it.

    Raises:
        CommandError: PG614, the address cannot be listened at.
        PiecegraphError: what ``load`` raised.
    """
    with listen(settings.host, settings.port) as listening, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(HttpServer(Service(settings)).serve_model(listening, load, on_ready))


class HttpServer(uvicorn.Server):
    """uvicorn's, which stops accepting and lets connections end. A signal is no reason to die of it afterwards."""

    def __init__(self, service: Service) -> None:
        self.service = service
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=service.settings.drain_s,  # type: ignore[arg-type] # it is waited for as it is
            )
        )

    async def serve_model(
        self, listening: socket.socket, load: Callable[[], AsyncLLM], on_ready: Callable[[str], None]
    ) -> bool:
        """See :func:`serve`."""
        loaded = _in_thread(load)

        def begin(done: asyncio.Future[AsyncLLM]) -> None:
            if done.exception() is not None:
                self.service.state, self.should_exit = "failed", True
            else:
                self.service.begin(done.result())
                on_ready(address_of(listening))

        loaded.add_done_callback(begin)
        await self.serve(sockets=[listening])
        if not loaded.done():
            loaded.remove_done_callback(begin)
            return False
        await self.service.end(loaded.result())
        return True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.drain()
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


def _in_thread(load: Callable[[], AsyncLLM]) -> asyncio.Future[AsyncLLM]:
    """Call something on a thread that nobody waits for when the process ends: a model takes its time."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[AsyncLLM] = loop.create_future()

    def tell(set_it: Callable[..., None], value: AsyncLLM | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(lambda: None if done.done() else set_it(value))

    def run() -> None:
        try:
            found = load()
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            tell(done.set_exception, error)
        else:
            tell(done.set_result, found)

    threading.Thread(target=run, name="piecegraph-load", daemon=True).start()
    return done


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return None
    return uvloop.new_event_loop
