"""A model of this process behind a server on loopback, requests that other processes send there, and their cost."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import piecegraph
from piecegraph.base.progress import Progress
from piecegraph.bench.client import Client
from piecegraph.bench.load import moments
from piecegraph.bench.sending import Sent, default_processes, send_all
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.http_server import loop_factory
from piecegraph.serve.listening import address_of, listen_all
from piecegraph.serve.models import Models
from piecegraph.serve.processes.engine_side import EngineServer
from piecegraph.serve.server import make_server
from piecegraph.serve.settings import ServeSettings

NAME = "model"
_START_S = 300
_MAX_QUEUE = 1 << 20
"""A load at a fixed rate is not to be refused: that it waits is what is measured."""


@dataclass(frozen=True)
class Run:
    """What requests got, and what that cost."""

    sent: Sent
    engine_s: float
    """Seconds of CPU, of the process that runs the model."""
    apis_s: float
    """Of all API processes."""


@dataclass(frozen=True)
class Address:
    """A server that is running."""

    url: str
    pids: Sequence[int]
    """Of its API processes."""

    def send(
        self,
        prompts: Sequence[Any],
        num_new: Sequence[int],
        *,
        concurrency: int,
        rate: float | None = None,
        seed: int = 0,
    ) -> Run:
        """Ask for so many tokens behind each prompt. Ends the program if somebody gets others."""
        client = Client(self.url)
        how = {"model": NAME, "temperature": 0, "ignore_eos": True}
        asked = zip(prompts, num_new, strict=True)
        requests = [client.request_for({**how, "prompt": prompt, "max_tokens": count}) for prompt, count in asked]
        engine, apis = time.process_time(), self._apis_s()
        with Progress("auto").bar("requests", len(requests)) as bar:
            sent = send_all(
                client.target(),
                requests,
                bar,
                concurrency=concurrency if rate is None else len(requests),
                num_processes=default_processes(concurrency),
                moments_s=None if rate is None else moments(len(requests), rate, seed),
            )
        run = Run(sent, time.process_time() - engine, self._apis_s() - apis)
        if [answer.num_new for answer in sent.answers if answer.is_whole] != list(num_new):
            statuses = sorted({answer.status for answer in sent.answers})
            raise SystemExit(f"some requests did not get all their tokens: {', '.join(statuses)}")
        return run

    def _apis_s(self) -> float:
        return sum(map(_cpu_s, self.pids))


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


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
