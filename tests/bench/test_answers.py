"""An answer of a server, from its bytes."""

from __future__ import annotations

import http.client

import pytest

from piecegraph.bench.answers import Answer, AnswerReader

TEXT = b'data: {"choices": [{"text": "a"}], "usage": null, "error": null}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("body", "status", "num_parts"),
    [
        (TEXT + DONE, "200", 1),
        (TEXT + b": a comment\n\n" + TEXT + USAGE + DONE, "200", 2),
        (b'data: {"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":7}}\n\n' + DONE, "200", 1),
        (b'data: {"choices": [{"text": ""}]}\n\n' + TEXT + DONE, "200", 2),
        (TEXT + b'data: {"choices": [{"text": ""}]}\n\n' + DONE, "200", 1),
        (b'data: {"choices": [{"text": "\\"error\\": 1, \\"usage\\": {"}]}\n\n' + DONE, "200", 1),
        (b'data: {"choices": [{"text": "", "what": "\\"text\\": \\"a"}]}\n\n' + TEXT + DONE, "200", 2),
        (TEXT + DONE + b"data: what comes behind it\n\n", "200", 1),
        (TEXT, "IncompleteRead", 0),
        (TEXT[:-9], "IncompleteRead", 0),
        (b"", "IncompleteRead", 0),
        (DONE, "no answer", 0),
        (TEXT + b'data: {"error": {"message": "no memory"}}\n\n' + DONE, "error in the stream", 1),
        (b"data: {\n\n", "HTTPException", 0),
        (b"data: 5\n\n", "HTTPException", 0),
    ],
)
def test_what_servers_may_answer(body: bytes, status: str, num_parts: int) -> None:
    for head, sent in (
        (b"Transfer-Encoding: Chunked", b"".join(in_chunks(body, 11)) + b"0\r\n\r\n"),
        (b"Content-Length: %d" % len(body), body),
        (b"Connection: close", body),
    ):
        for step in (1, 7, 1 << 20):
            answer = read(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + sent, step)
            assert (answer.status, len(answer.times_s)) == (status, num_parts), (head, step)
            if answer.is_whole:
                expected = (7, 3) if USAGE in body else (7 if b"prompt_tokens" in body else 0, num_parts)
                assert (answer.num_prompt, answer.num_new) == expected, "without usage, parts are counted"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 1000\r\n\r\n", "503"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404\r\n\r\n", "404"),
        (b"", "RemoteDisconnected"),
        (b"HTTP/1.1 200 OK\r\n", "RemoteDisconnected"),
        (b"hello\r\n\r\n", "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\n" + b"a" * 70_000, "LineTooLong"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhello\r\n", "IncompleteRead"),
    ],
)
def test_what_is_no_answer(data: bytes, status: str) -> None:
    assert read(data, 5).status == status


def test_a_part_has_the_moment_at_which_it_came() -> None:
    reader = AnswerReader(10.0)
    reader.feed(b"HTTP/1.1 200 OK\r\n\r\n" + TEXT[:-9], 10.5)
    reader.feed(TEXT[-9:], 11.0)
    reader.feed(TEXT + TEXT, 12.0)
    reader.feed(DONE, 13.0)
    assert reader.answer == Answer(status="200", times_s=(1.0, 2.0, 2.0), num_new=3)


def read(data: bytes, step: int) -> Answer:
    """As it is read if so many bytes come at once."""
    reader = AnswerReader(0.0)
    try:
        for start in range(0, len(data), step):
            reader.feed(data[start : start + step], 1.0)
        reader.end()
    except http.client.HTTPException as error:
        return Answer(status=type(error).__name__)
    assert reader.answer is not None
    return reader.answer


def in_chunks(body: bytes, size: int) -> list[bytes]:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return [b"%x;more=1\r\n%s\r\n" % (len(part), part) for part in parts]
