"""What a client may do to a connection: it is answered or told, at once, and holds nobody up."""

from __future__ import annotations

import logging
import socket
import struct

import pytest
from starlette.types import Receive, Scope, Send

import piecegraph
from piecegraph.serve.guards import Guards
from tests.cases.serving import Served, http
from tests.serve.test_server import BODY, held, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
DATA = http("", BODY).partition(b"\r\n\r\n")[2]
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def sized(length: object, data: bytes = DATA) -> bytes:
    return HEAD + f"Content-Length: {length}\r\n\r\n".encode() + data


def answered(client: socket.socket) -> bytes:
    """All that comes until the server ends the connection, which is soon."""
    client.settimeout(10)
    text = b""
    while new := client.recv(4096):
        text += new
    return text


def statuses(text: bytes) -> list[int]:
    return [int(part.split()[0]) for part in text.split(b"HTTP/1.1 ")[1:]]


BROKEN_BODIES = [
    CHUNKED + b"zz\r\n",
    CHUNKED + chunk(DATA[:10]) + b"5\r\n" + DATA[10:],
    CHUNKED + chunk(DATA) + b"0\r\nno\x00header\r\n\r\n",
    CHUNKED + b"-1\r\n",
    CHUNKED + b"f" * 20 + b"\r\n",
    HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + DATA,
]
BROKEN_HEADS = [
    sized("many"),
    sized(-1),
    sized(""),
    sized("9" * 30),
    sized(f"{len(DATA)}\r\nContent-Length: 5"),
    HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(DATA) + b"0\r\n\r\n",
    b"hello world\r\n\r\n",
    b"GET health HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("sent", BROKEN_BODIES + BROKEN_HEADS)
def test_a_request_that_is_none_is_told_at_once(running: Served, sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for before in (b"", HEALTH, http("/v1/completions", BODY)):
        with running.connect() as client:
            client.sendall(before + sent)
            text = answered(client)
        is_told = sent in BROKEN_BODIES or not before  # the end says enough behind an answer that was still to come
        assert statuses(text) == [200] * bool(before) + [400] * is_told
        assert text.endswith(b"}")
    assert not any(record.exc_info for record in caplog.records)
    wait_until(running.is_idle)


def test_broken_bodies_are_told_as_their_api_does(running: Served) -> None:
    with running.connect() as client:
        client.sendall(CHUNKED.replace(b"completions", b"messages") + chunk(DATA[:10]) + b"zz\r\n")
        assert b'{"type":"error","error":{"type":"invalid_request_error"' in answered(client)
    with running.connect() as client:  # which were refused before their bodies were read
        client.sendall(CHUNKED.replace(b"localhost", b"site.example") + chunk(DATA[:10]))
        text = b""
        while not text.endswith(b"}"):
            text += client.recv(4096)
        client.sendall(b"zz\r\n")
        assert statuses(text + answered(client)) == [403]


@pytest.mark.parametrize("sent", [HEAD, sized(len(DATA) + 10), sized(len(DATA), DATA[:5]), CHUNKED + chunk(DATA)])
def test_a_connection_that_ends_before_its_request(running: Served, sent: bytes) -> None:
    with running.connect() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        text = answered(client)
        assert statuses(text) == [400]
        assert b"the connection has ended before the request" in text


def test_clients_that_go_away_within_a_body(running: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "piecegraph.serve.requests")
    for sent in (HEAD, sized(len(DATA) + 10), CHUNKED + chunk(DATA[:10])):
        for lingers in (b"", struct.pack("ii", 1, 0)):  # the second is not told apart from a cable that is cut
            with running.connect() as client:
                if lingers:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingers)
                client.sendall(sent)
    wait_until(lambda: len(caplog.messages) >= 4)
    assert all('"status": 400' in each or '"status": 499' in each for each in caplog.messages)
    assert not any(record.exc_info for record in caplog.records)
    assert running.get("/health")[0] == 200


@pytest.mark.parametrize(("sent", "found"), [(CHUNKED + b"zz\r\n", [200, 400]), (CHUNKED, [200, 400]), (HEAD, [200])])
def test_the_request_before_is_answered(
    running: Served, tiny: piecegraph.LLM, sent: bytes, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running.connect() as client:
        with held(tiny, monkeypatch):
            client.sendall(http("/v1/completions", BODY) + sent)
            client.shutdown(socket.SHUT_WR)
        assert statuses(answered(client)) == found


def test_a_client_that_waits_to_be_asked_for_its_body(running: Served) -> None:
    for host, found in ((b"localhost", [100, 200]), (b"site.example", [403])):
        with running.connect() as client:
            head = b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(DATA)
            client.sendall(HEAD.replace(b"localhost", host) + head)
            text = client.recv(4096)
            if found[0] == 100:
                client.sendall(DATA)
            assert statuses(text + answered(client)) == found


def test_clients_that_know_no_chunks(running: Served) -> None:
    """Of HTTP/1.0, as proxies speak it: the end of the connection is that of the answer."""
    old = sized(len(DATA)).replace(b"HTTP/1.1", b"HTTP/1.0")
    streamed = http("/v1/completions", {**BODY, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
    kept = streamed.replace(b"Host:", b"Connection: keep-alive\r\nExpect: 100-continue\r\nHost:")
    for sent in (streamed, kept, kept.replace(b"HTTP/1.0", b"HTTP/0.9")):
        with running.connect() as client:
            client.sendall(sent)
            head, _, text = answered(client).partition(b"\r\n\r\n")
        assert statuses(head) == [200], "and the client is not asked for its body"
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert text.startswith(b"data: {")
        assert text.endswith(b"data: [DONE]\n\n")
    with running.connect() as client:
        client.sendall(old)
        head, _, text = answered(client).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(text) in head
    with running.connect() as client:
        client.sendall(old.replace(b"POST", b"HEAD"))
        assert statuses(answered(client)) == [405]


def test_headers_behind_a_body_are_not_kept(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    scopes: list[Scope] = []
    call = Guards.__call__

    async def noted(self: Guards, scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await call(self, scope, receive, send)

    monkeypatch.setattr(Guards, "__call__", noted)
    with running.connect() as client:
        client.sendall(CHUNKED + chunk(DATA) + b"0\r\n" + b"Host: site.example\r\n" * 9000 + b"\r\n")
        assert statuses(client.recv(4096)) == [200]
    assert len(scopes[0]["headers"]) == 3


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_clients_that_would_rather_speak_another_protocol(
    running: Served, protocol: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAMAAABk\r\n" % protocol
    health = HEALTH.replace(b"\r\n\r\n", b"\r\n" + wish + b"\r\n")
    in_one, in_chunks = (HEAD + wish + each.removeprefix(HEAD) for each in (sized(len(DATA)), CHUNKED))
    sent = health + in_one + in_chunks + chunk(DATA[:9]) + chunk(DATA[9:]) + b"0\r\n\r\n" + health * 500
    for size in (len(sent), 7):
        with running.connect() as client:
            for first in range(0, len(sent), size):
                client.sendall(sent[first : first + size])
            client.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert statuses(answered(client)) == [200] * 504
    assert not caplog.messages
    with running.connect() as client:
        client.sendall(HEAD + wish + b"Transfer-Encoding: gzip\r\n\r\n" + DATA)
        assert statuses(answered(client)) == [400]


def test_clients_of_the_older_kind(running: Served) -> None:
    for sent in (HEALTH, http("/v1/completions", BODY)):
        with running.connect() as client:
            client.sendall(sent.replace(b"HTTP/1.1\r\nHost: localhost", b"HTTP/1.0"))
            assert statuses(answered(client)) == [200]
