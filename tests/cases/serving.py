"""A server on a thread of its own, and clients that are plainer than any library's."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import piecegraph
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.listening import address_of, listen_all
from piecegraph.serve.model_server import ModelServer
from piecegraph.serve.models import Models
from piecegraph.serve.server import make_server
from piecegraph.serve.service import Service
from piecegraph.serve.settings import ServeSettings


@dataclass
class Served:
    """A server that is running."""

    address: str
    llm: piecegraph.LLM
    server: ModelServer

    @property
    def service(self) -> Service:
        return self.server.models.find(None)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers of an answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._open(
            urllib.request.Request(self.address + path, data, {"Content-Type": "application/json", **headers})
        )

    def get(self, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
        return self._open(urllib.request.Request(self.address + path, headers=headers))

    def _open(self, request: urllib.request.Request) -> tuple[int, Any, dict[str, str]]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, headers, text = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            status, headers, text = error.code, error.headers, error.read()
        is_json = headers.get("content-type", "").startswith("application/json")
        return status, json.loads(text) if is_json else text.decode(), dict(headers)

    def connect(self) -> socket.socket:
        host, port = self.address.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def is_idle(self) -> bool:
        """Whether nothing is held by anybody."""
        scheduler = self.llm.started.engine.scheduler
        return not scheduler.num_unfinished and not scheduler.cache.usage and not self.service.llm.load().num_waiting


def http(path: str, body: Any) -> bytes:
    """A request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


@contextmanager
def served(
    llm: piecegraph.LLM,
    *,
    load: Callable[[ModelSpec], AsyncLLM] | None = None,
    names: Sequence[str] = ("tiny",),
    **settings: Any,
) -> Iterator[Served]:
    """Serve a model on a port that is free; or several, each of which ``load`` finds by its name."""
    chosen = ServeSettings(**{"port": 0, **settings})
    make = load or (lambda _: AsyncLLM(llm, max_queue=chosen.max_queue))
    server, is_ready = make_server(Models(chosen, make)), threading.Event()
    specs = [ModelSpec(name=name, path=name) for name in names]
    with ExitStack() as stack:
        listening = listen_all(chosen.host, chosen.port, chosen.api_processes or 1)
        for each in listening:
            stack.enter_context(each)

        def run() -> None:
            asyncio.run(server.serve_models(listening, specs, lambda _: is_ready.set()))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        if load is None:
            assert is_ready.wait(60)
        try:
            yield Served(address_of(listening[0]), llm, server)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
