"""A server under load: what its answers were, and when they came."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from piecegraph.base.progress import Progress
from piecegraph.bench.answers import Answer
from piecegraph.bench.client import Client
from piecegraph.bench.latency import latency_of
from piecegraph.bench.load import Load, as_text, moments, run_load
from piecegraph.bench.sending import Sent
from piecegraph.bench.workloads import Workload
from piecegraph.errors import CommandError

LOAD = Load(
    client=Client("127.0.0.1"), model="m", workload=Workload(200, (1, 1), (1, 1)), num_requests=200,
    concurrency=2, rate=1000.0, ignore_eos=False, seed=3, num_processes=1,
)  # fmt: skip


def test_a_server_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandError, match="PG616 ftp://x is no address"):
        Client("ftp://x")
    with pytest.raises(CommandError, match="does not answer"):
        Client("127.0.0.1:9").model_name()
    with answering(b"hello") as url, pytest.raises(CommandError, match="does not tell its models"):
        Client(url).model_name()
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=socket.gaierror("no such name")))
    with pytest.raises(CommandError, match="http://nowhere does not answer: no such name"):
        Client("nowhere").target()


def test_requests_come_at_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {}

    def send_all(target: Any, requests: list[bytes], bar: Any, **given: Any) -> Sent:
        how.update(given)
        return Sent(answers=[Answer(status="200", times_s=(0.1,), num_new=1)] * len(requests), seconds=1.0, busy=(0.5,))

    monkeypatch.setattr("piecegraph.bench.load.send_all", send_all)
    result = run_load(LOAD, Progress(False))
    assert (result.num_whole, result.client_busy, result.is_client_bound) == (200, (0.5,), False)
    assert len(how["moments_s"]) == 200
    assert how["moments_s"][0] == 0
    assert how["moments_s"][-1] == pytest.approx(0.2, rel=0.3)
    assert how["moments_s"] == moments(200, 1000.0, 3) != moments(200, 1000.0, 4)
    assert LOAD.bodies() == LOAD.bodies() != replace(LOAD, seed=4).bodies()
    assert "The client was the limit" not in as_text(result)
    assert "The client was the limit" in as_text(replace(result, is_client_bound=True))


def test_latency_of_a_request_with_one_token() -> None:
    latency = latency_of([(0.25,)], seconds=0.5, num_prompt=3, num_new=1)
    assert (latency.first_p99_ms, latency.gap_worst_ms, latency.all_tokens_s) == (250.0, 0.0, 8.0)


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server that answers everything alike."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
