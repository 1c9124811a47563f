"""Requests that other processes send to a server, and their cost."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.base.progress import Progress
from piecegraph.bench.client import Client
from piecegraph.bench.load import moments
from piecegraph.bench.sending import Sent, default_processes, send_all

NAME = "model"


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


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
