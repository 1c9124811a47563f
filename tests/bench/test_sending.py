"""Requests sent by several processes: which, when, and what happens if one of them, or who wanted them, is gone."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from piecegraph.bench.client import Client
from piecegraph.bench.client_process import Job
from piecegraph.bench.sending import Sent, _numbers, _Process, default_processes, send_all
from piecegraph.errors import CommandError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


class Watched:
    """A bar."""

    def __init__(self) -> None:
        self.advanced: list[str] = []

    def advance(self, what: str) -> None:
        self.advanced.append(what)


def test_each_request_is_sent_once_by_one_of_the_processes() -> None:
    bar, open_now, most_open = Watched(), itertools.count(), []
    num_open, mutex = 0, threading.Lock()

    def answer(connection: socket.socket) -> None:
        nonlocal num_open
        asked = read_body(connection)
        with mutex:
            num_open += 1
            most_open.append(num_open)
            next(open_now)
        time.sleep(0.005)
        with mutex:  # before the client can know
            num_open -= 1
        connection.sendall(HEAD + events(asked["max_tokens"]))

    with answering(answer) as url:
        sent = send(url, 40, bar=bar, concurrency=5, num_processes=3)
    assert [each.num_new for each in sent.answers] == list(range(1, 41)), "in the order of the requests"
    assert next(open_now) == 40
    assert 3 <= max(most_open) <= 5
    assert bar.advanced == ["200"] * 40
    assert len(sent.busy) == 3
    assert all(0 < share < 1 for share in sent.busy)
    assert sent.is_client_bound == (max(sent.busy) > 0.9)
    assert Sent(answers=[], seconds=1.0, busy=(0.2, 0.95)).is_client_bound


def test_requests_are_sent_at_their_moments() -> None:
    came: dict[int, float] = {}

    def answer(connection: socket.socket) -> None:
        asked = read_body(connection)
        came[asked["max_tokens"]] = time.perf_counter()
        connection.sendall(HEAD + events(1))

    moments_s = [0.0, 0.1, 0.15, 0.4]
    with answering(answer) as url:
        sent = send(url, 4, concurrency=4, num_processes=2, moments_s=moments_s)
    assert sent.seconds >= 0.4
    for number, moment_s in enumerate(moments_s):
        assert came[number + 1] - came[1] > moment_s - 0.05


def test_a_request_that_waits_for_room_is_late() -> None:
    def answer(connection: socket.socket) -> None:
        read_body(connection)
        time.sleep(0.1)
        connection.sendall(HEAD + events(1))

    with answering(answer) as url:
        rushed = send(url, 3, concurrency=1, moments_s=[0.0, 0.0, 0.0])
        patient = send(url, 3, concurrency=1)
    assert rushed.answers[2].times_s[0] > 0.29
    assert min(each.times_s[0] for each in patient.answers[1:]) < 0.29


def test_a_connection_that_fails_is_the_status_of_its_request() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        refused = send(f"http://127.0.0.1:{nobody.getsockname()[1]}", 2)
    assert [each.status for each in refused.answers] == ["ConnectionRefusedError"] * 2
    with answering(lambda connection: connection.recv(1 << 16)) as url:
        assert [each.status for each in send(url, 1).answers] == ["RemoteDisconnected"]
    silent = threading.Event()
    with answering(lambda _: silent.wait()) as url:
        assert [each.status for each in send(url, 2, timeout_s=0.1).answers] == ["TimeoutError"] * 2
        silent.set()


def test_a_process_that_is_killed_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **how: started.append(start(*args, **how)) or started[-1])

    def answer(connection: socket.socket) -> None:
        started[1].kill()
        connection.recv(1 << 20)
        connection.recv(1)  # until it is closed

    with answering(answer) as url, pytest.raises(CommandError, match=r"PG618 .* ended with -9"):
        send(url, 8, concurrency=4, num_processes=2)
    assert [each.poll() for each in started] == [-9, -9]


@pytest.fixture
def _heeds_interrupts() -> Iterator[None]:
    """What is started in the background inherits that the signal is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeds_interrupts")
def test_ctrl_c_ends_them() -> None:
    is_asked, is_closed = threading.Event(), threading.Event()

    def answer(connection: socket.socket) -> None:
        read_body(connection)
        if not is_asked.is_set():
            is_asked.set()
            os.kill(os.getpid(), signal.SIGINT)
        assert connection.recv(1) == b""
        is_closed.set()

    with answering(answer) as url, pytest.raises(KeyboardInterrupt):
        send(url, 4, concurrency=2, num_processes=2)
    assert is_closed.wait(10)


def test_a_process_ends_if_nobody_wants_it_any_more() -> None:
    is_asked, may_end = threading.Event(), threading.Event()

    def answer(connection: socket.socket) -> None:
        is_asked.set()
        may_end.wait()

    with answering(answer) as url, _numbers(1) as numbers, _Process(numbers) as process:
        client = Client(url)
        job = Job(
            target=client.target(), requests=[client.request_for({})], numbers=numbers, moments_s=None, concurrency=1
        )
        process.give(pickle.dumps(job))
        process.receive()
        process.give(b"g")
        assert is_asked.wait(10)
        inner = process._process
        assert inner.stdin is not None
        inner.stdin.close()
        assert inner.wait(10) == 1
        may_end.set()


def test_by_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("a certificate is made by openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    more = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *more], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def answer(connection: socket.socket) -> None:
        try:
            wrapped = context.wrap_socket(connection, server_side=True)
        except OSError:  # the client does not trust it
            return
        with wrapped:
            read_body(wrapped)
            wrapped.sendall(HEAD + events(2))

    with answering(answer) as url:
        url = url.replace("http://127.0.0.1", "https://localhost")
        assert [each.status for each in send(url, 1).answers] == ["SSLCertVerificationError"]
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert [each.num_new for each in send(url, 2).answers] == [2, 2]


def test_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, expected in ((2, [1, 1, 1]), (12, [1, 2, 3]), (64, [1, 2, 4])):
        cores = set(range(num_cores))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        assert [default_processes(concurrency) for concurrency in (64, 128, 1000)] == expected


def send(url: str, count: int, *, bar: Watched | None = None, timeout_s: float = 60.0, **how: Any) -> Sent:
    """As many requests as there are numbers; each asks for its own, counted from 1."""
    client = Client(url, timeout_s=timeout_s)
    requests = [client.request_for({"max_tokens": number + 1}) for number in range(count)]
    return send_all(client.target(), requests, bar or Watched(), **{"concurrency": 4, "num_processes": 1, **how})


def read_body(connection: socket.socket) -> Any:
    data = b""
    while not data.endswith(b"}"):
        more = connection.recv(1 << 16)
        if not more:  # a loop that reads on would be at work until the last test
            raise ConnectionResetError
        data += more
    return json.loads(data.partition(b"\r\n\r\n")[2])


def events(num_new: int) -> bytes:
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": num_new}})
    return f'data: {{"choices": [{{"text": "a"}}]}}\n\ndata: {usage}\n\ndata: [DONE]\n\n'.encode()


@contextmanager
def answering(answer: Callable[[socket.socket], Any]) -> Iterator[str]:
    """A server with a thread for each connection, which is closed when it has been answered."""

    def close_after(connection: socket.socket) -> None:
        with connection, suppress(ConnectionResetError):
            answer(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=close_after, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
