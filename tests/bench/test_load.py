"""A server under load: what its answers were, and when they came."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from piecegraph.base.progress import Progress
from piecegraph.bench.client import Answer, Client
from piecegraph.bench.latency import latency_of
from piecegraph.bench.load import Load, run_load
from piecegraph.bench.workloads import Workload
from piecegraph.errors import CommandError


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n', "200"),
        (b'data: {"choices": [{"text": "a"}]}\n\n', "IncompleteRead"),
        (b"data: [DONE]\n\n", "no answer"),
        (b'data: {"error": {"message": "no memory"}}\n\ndata: [DONE]\n\n', "error in the stream"),
        (b"data: {\n\n", "HTTPException"),
    ],
)
def test_what_other_servers_may_answer(body: bytes, status: str) -> None:
    with answering(body) as url:
        answer = Client(url).complete({"prompt": "a"})
    assert answer.status == status
    if answer.is_whole:
        assert (len(answer.times_s), answer.num_new, answer.num_prompt) == (1, 1, 0), "without usage, parts are counted"


def test_a_server_that_is_none_is_refused() -> None:
    with pytest.raises(CommandError, match="PG616 ftp://x is no address"):
        Client("ftp://x")
    with pytest.raises(CommandError, match="does not answer"):
        Client("127.0.0.1:9").model_name()
    with answering(b"hello") as url, pytest.raises(CommandError, match="does not tell its models"):
        Client(url).model_name()
    assert Client("127.0.0.1:9").complete({}) == Answer(status="ConnectionRefusedError")


def test_requests_come_at_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("piecegraph.bench.load.time.sleep", slept.append)
    monkeypatch.setattr(Client, "complete", lambda self, body: Answer(status="200", times_s=(0.1,), num_new=1))
    load = Load(
        client=Client("x"), model="m", workload=Workload(200, (1, 1), (1, 1)), num_requests=200,
        concurrency=2, rate=1000.0, ignore_eos=False, seed=3,
    )  # fmt: skip
    result = run_load(load, Progress(False))
    assert result.num_whole == len(slept) == 200
    assert slept[-1] == pytest.approx(0.2, rel=0.3), "nobody slept, so the last waits for all before it"
    assert load.bodies() == load.bodies() != replace(load, seed=4).bodies()


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
