"""Many clients at once, some of them rude: every answer is that of the same request alone, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from typing import Any

import pytest

import piecegraph
from piecegraph.llm.run import model_step
from tests.cases.serving import Served, http, served
from tests.serve.test_server import wait_until

NUM_STREAMS, NUM_DISTINCT = 128, 24
WORDS = [f"{first}{second}" for first in "abcdefg" for second in "xyz"]


def make_bodies() -> list[dict[str, Any]]:
    random.seed(0)
    bodies = []
    for i in range(NUM_DISTINCT):
        prompt = " ".join(random.choices(WORDS, k=random.randint(1, 20)))
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": random.randint(1, 24), "stream": True}
        body |= {"temperature": 0} if i % 3 else {"temperature": 0.9, "seed": i, "top_k": 5}
        bodies.append(body | ({"repetition_penalty": 1.2} if i % 4 == 1 else {}))
    return random.choices(bodies, k=NUM_STREAMS)


def alone(llm: piecegraph.LLM, body: dict[str, Any]) -> str | None:
    names = {"temperature", "seed", "top_k", "repetition_penalty"}
    how = {name: value for name, value in body.items() if name in names}
    return llm.generate([body["prompt"]], max_new_tokens=body["max_tokens"], **how)[0].text


async def stream(host: str, port: int, body: dict[str, Any], *, drops: bool, is_slow: bool) -> str | None:
    """The text of a stream; None for a client that went away in the middle of it."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(http("/v1/completions", body))
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head, head
        text, left = "", b""
        while b"data: [DONE]" not in left:
            if is_slow:
                await asyncio.sleep(0.02)
            new = await reader.read(200 if is_slow else 65536)
            assert new, left
            if drops:
                return None
            left += new
        for line in left.split(b"\n"):
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
        return text
    finally:
        writer.close()


async def send_junk(host: str, port: int, junk: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(junk)
    found = await reader.read(65536)
    writer.close()
    return found


def test_many_clients_at_once(tiny: piecegraph.LLM) -> None:
    bodies = make_bodies()
    texts = {each: alone(tiny, json.loads(each)) for each in {json.dumps(body) for body in bodies}}
    expected = [texts[json.dumps(body)] for body in bodies]
    junk = [http("/v1/completions", {"model": "tiny", "prompt": 7}), b"GARBAGE\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"]

    async def run(host: str, port: int) -> list[Any]:
        clients = [stream(host, port, body, drops=i % 10 == 3, is_slow=i % 16 == 5) for i, body in enumerate(bodies)]
        rude = [send_junk(host, port, each) for each in junk * 4]
        return await asyncio.wait_for(asyncio.gather(*clients, *rude), 60)

    with served(tiny) as running:
        host, port = running.address.removeprefix("http://").split(":")
        found = asyncio.run(run(host, int(port)))
        wait_until(running.is_idle)
        llm = running.service.llm
        assert not llm._calls
        assert not llm._in_engine
        assert not llm._outbox
    for i, (text, known) in enumerate(zip(found, expected, strict=False)):
        assert text == (None if i % 10 == 3 else known), i
    assert all(re.match(rb"HTTP/1.1 40[05] ", answer) for answer in found[NUM_STREAMS:])
    tiny.started.engine.scheduler.check()


# ------------------------------------------------------------------ faults, one for each stage


BODY = {"model": "tiny", "prompt": "ax by", "max_tokens": 6, "temperature": 0}


@pytest.fixture
def healthy(running: Served) -> Any:
    expected = running.post("/v1/completions", BODY)[1]["choices"][0]["text"]
    yield expected
    wait_until(running.is_idle)
    assert running.post("/v1/completions", BODY)[1]["choices"][0]["text"] == expected
    assert running.get("/ready")[0] == 200


def both(running: Served, other: dict[str, Any]) -> tuple[tuple[int, Any], tuple[int, Any]]:
    """A request beside another."""

    async def run() -> Any:
        asked = [asyncio.to_thread(running.post, "/v1/completions", body) for body in (BODY, other)]
        return await asyncio.gather(*asked)

    return tuple(found[:2] for found in asyncio.run(run()))  # type: ignore[return-value]


def test_a_fault_in_the_tokenizer(
    running: Served, tiny: piecegraph.LLM, healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, decode = type(tiny.tokenizer).__call__, tiny.tokenizer.decode
    gz = tiny.tokenizer.convert_tokens_to_ids("gz")

    def failing(tokenizer: Any, text: Any, **how: Any) -> Any:
        if text == "bad":
            raise Exception("no such text")
        return encode(tokenizer, text, **how)

    def failing_too(ids: Any, **how: Any) -> Any:
        if gz in list(ids):
            raise Exception("no such tokens")
        return decode(ids, **how)

    monkeypatch.setattr(type(tiny.tokenizer), "__call__", failing)
    monkeypatch.setattr(tiny.tokenizer, "decode", failing_too)
    monkeypatch.setattr(tiny.tokenizer, "clean_up_tokenization_spaces", True)  # or it is not asked
    good, bad = both(running, {**BODY, "prompt": "bad"})
    assert (good[0], good[1]["choices"][0]["text"]) == (200, healthy)
    assert (bad[0], bad[1]["error"]["code"]) == (400, "PG653")
    good, bad = both(running, {**BODY, "prompt": [gz]})
    assert (good[0], good[1]["choices"][0]["text"]) == (200, healthy)
    assert (bad[0], bad[1]["error"]["code"]) == (500, "engine_error")
    assert "no such tokens" in bad[1]["error"]["message"]


@pytest.mark.parametrize("stage", ["step", "sampler"])
def test_a_fault_in_a_step(
    running: Served, tiny: piecegraph.LLM, healthy: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, name = (tiny.started.engine.forward, "run_step") if stage == "step" else (model_step, "sample")
    call, count = getattr(place, name), 0

    def failing(*args: Any, **how: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("a fault")
        return call(*args, **how)

    monkeypatch.setattr(place, name, failing)
    status, answer, _ = running.post("/v1/completions", BODY)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "PG650 a step with the request failed: RuntimeError: a fault" in answer["error"]["message"]


def test_a_fault_in_the_middle_of_a_stream(
    running: Served, tiny: piecegraph.LLM, healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, has_begun = tiny.started.engine.forward, threading.Event()
    run_step, count = forward.run_step, 0

    def failing(key: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            assert has_begun.wait(60)
            raise RuntimeError("a fault")
        return run_step(key)

    monkeypatch.setattr(forward, "run_step", failing)
    with running.connect() as client:
        client.sendall(http("/v1/completions", {**BODY, "stream": True}))
        text = client.recv(65536)
        assert b" 200 " in text
        has_begun.set()
        while b"[DONE]" not in text:
            text += client.recv(65536)
    (error,) = [json.loads(line[6:]) for line in text.split(b"\n") if b'"error"' in line]
    assert error["error"]["code"] == "engine_error"


def test_a_client_that_resets_its_connection(running: Served, healthy: str) -> None:
    for body in ({**BODY, "max_tokens": 50}, {**BODY, "max_tokens": 50, "stream": True}):
        with running.connect() as client:
            client.sendall(http("/v1/completions", body))
            if "stream" in body:
                assert client.recv(10)
        wait_until(running.is_idle)
