"""A model of this process behind a server on loopback. Needs what ``piecegraph serve`` does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import piecegraph
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.http_server import loop_factory
from piecegraph.serve.listening import address_of, listen_all
from piecegraph.serve.models import Models
from piecegraph.serve.processes.engine_side import EngineServer
from piecegraph.serve.server import make_server
from piecegraph.serve.settings import ServeSettings
from served import NAME, Address

_START_S = 300
_MAX_QUEUE = 1 << 20
"""A load at a fixed rate is not to be refused: that it waits is what is measured."""


@contextmanager
def served(llm: piecegraph.LLM, num_processes: int) -> Iterator[Address]:
    """Answer requests to a model, by so many API processes; 0 for none besides this one."""
    settings = ServeSettings(port=0, api_processes=num_processes)
    server = make_server(Models(settings, lambda _: AsyncLLM(llm, max_queue=_MAX_QUEUE)))
    is_ready = threading.Event()
    listening = listen_all(settings.host, settings.port, num_processes or 1)

    def run() -> None:
        spec = ModelSpec(name=NAME, path=NAME)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(server.serve_models(listening, [spec], lambda _: is_ready.set()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if not is_ready.wait(_START_S):
        raise SystemExit("the server does not start")
    try:
        yield Address(address_of(listening[0]), server.pids if isinstance(server, EngineServer) else [])
    finally:
        server.should_exit = True
        thread.join(60)
