"""uvicorn's server around the application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import uvicorn

from piecegraph.serve.app import make_app
from piecegraph.serve.catalog import Catalog
from piecegraph.serve.listening import BACKLOG
from piecegraph.serve.protocol import HttpProtocol

_KEEP_ALIVE_S = 65
"""Longer than the clients' own pools keep a connection: whoever closes first must not be the one who listens."""


class ApiServer(uvicorn.Server):
    """uvicorn's, which stops accepting and lets connections end. Signals are the business of whoever runs it."""

    def __init__(self, models: Catalog) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(models),
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=models.settings.drain_s,  # type: ignore[arg-type] # it is waited for as it is
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the quickest event loop there is."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return None
    return uvloop.new_event_loop
