"""A server of several processes: all that one of a single process does, and what happens when one of them goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.errors import CommandError, ConfigError, RequestError
from piecegraph.llm.asking import Asked
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.llm.run.prompts import refused
from piecegraph.llm.run.results import Ending, TokenLogprob
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.listening import listen
from piecegraph.serve.processes import launch
from piecegraph.serve.processes.link import Link, Message
from piecegraph.serve.processes.wire import (
    asked_from_wire,
    asked_to_wire,
    details_from_wire,
    error_from_wire,
    error_to_wire,
    news_to_wire,
)
from piecegraph.serve.settings import ServeSettings
from tests.cases.serving import Served, http, served
from tests.cases.tiny_llm import write_tiny_llm
from tests.serve.test_load import alone, make_bodies, stream
from tests.serve.test_server import BODY, held, metrics, wait_until

ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def several(tiny: piecegraph.LLM) -> Iterator[Served]:
    with served(tiny, api_processes=2) as found:
        yield found


def pids(running: Served) -> list[int]:
    found: list[int] = running.get("/stats")[1]["api_processes"]
    return found


def test_streams_are_those_of_the_requests_alone(several: Served, tiny: piecegraph.LLM) -> None:
    bodies = make_bodies()[:32]
    host, port = several.address.removeprefix("http://").split(":")

    async def run() -> list[Any]:
        clients = [stream(host, int(port), body, drops=i % 8 == 3, is_slow=i % 8 == 5) for i, body in enumerate(bodies)]
        return await asyncio.wait_for(asyncio.gather(*clients), 60)

    before = metrics(several)
    found = asyncio.run(run())
    for i, (text, body) in enumerate(zip(found, bodies, strict=True)):
        assert text == (None if i % 8 == 3 else alone(tiny, body)), i
    wait_until(several.is_idle)
    tiny.started.engine.scheduler.check()
    after = metrics(several)
    assert after["vllm:request_success_total"] - before.get("vllm:request_success_total", 0) >= 28
    assert after["piecegraph:http_responses_total"] - before.get("piecegraph:http_responses_total", 0) >= 28


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nothing"}}}
SAID = [{"role": "user", "content": "ax by"}]
TEXT: dict[str, Any] = {**BODY, "max_tokens": 12}
TALK: dict[str, Any] = {"model": "tiny", "messages": SAID, "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**TEXT, "logprobs": 3}),
        ("/v1/completions", {**TEXT, "logprobs": 1, "echo": True}),
        ("/v1/completions", {**TEXT, "n": 3, "temperature": 1, "seed": 7}),
        ("/v1/completions", {**TEXT, "prompt": ["ax", "by cz"], "bad_words": ["gx"], "logit_bias": {"9": 5}}),
        ("/v1/completions", {**TEXT, "structured_outputs": {"regex": "ax( by)+ cz"}}),
        ("/v1/completions", {**TEXT, "structured_outputs": {"regex": "("}}),
        ("/v1/completions", {**TEXT, "prompt": [5] * 600}),
        ("/v1/completions", {**TEXT, "prompt": "\ud800"}),
        ("/v1/completions", {**TEXT, "prompt": [999]}),
        ("/v1/completions", {**TEXT, "top_p": 7}),
        ("/v1/completions", {**TEXT, "model": "other"}),
        ("/v1/chat/completions", {**TALK, "logprobs": True, "top_logprobs": 2, "n": 2}),
        ("/v1/chat/completions", {**TALK, "response_format": SCHEMA}),
        ("/v1/messages", TALK),
        ("/v1/responses", {"model": "tiny", "input": "ax by", "max_output_tokens": 16, "temperature": 0}),
        ("/v1/embeddings", {"model": "tiny", "input": "ax by"}),
        ("/tokenize", {"messages": SAID}),
        ("/detokenize", {"tokens": [7, 8]}),
    ],
)
def test_answers_are_those_of_one_process(several: Served, running: Served, path: str, body: dict[str, Any]) -> None:
    status, answer, headers = several.post(path, body)
    expected = running.post(path, body)
    assert (status, plain(answer)) == (expected[0], plain(expected[1]))
    assert headers["x-request-id"]


_OF_ONE_ANSWER = {"id", "created", "created_at", "completed_at"}


def plain(answer: Any) -> Any:
    """Without what is different every time."""
    if isinstance(answer, dict):
        return {name: plain(value) for name, value in answer.items() if name not in _OF_ONE_ANSWER}
    return [plain(each) for each in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("streams", [False, True])
def test_stop_texts(several: Served, tiny: piecegraph.LLM, streams: bool) -> None:
    (whole,) = tiny.generate("ax by", max_new_tokens=12)
    assert whole.text is not None
    stop = whole.text.split()[3]
    (expected,) = tiny.generate("ax by", max_new_tokens=12, stop=stop)
    body = {**TEXT, "stop": stop, "n": 2, "stream": streams, "stream_options": {"include_usage": True}}
    found = several.post("/v1/completions", body if streams else {**body, "stream_options": None})[1]
    texts, reasons = ["", ""], set[Any]()
    events = (
        [json.loads(each[6:]) for each in found.split("\n\n") if each.startswith("data: {")] if streams else [found]
    )
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
        reasons.add((choice["finish_reason"], choice["stop_reason"]))
    assert texts == [expected.text] * 2
    assert reasons - {(None, None)} == {("stop", stop)}
    assert events[-1]["usage"]["completion_tokens"] == 2 * len(expected.token_ids)
    wait_until(several.is_idle)


def test_clients_that_go_away(several: Served) -> None:
    for body in ({**BODY, "max_tokens": 50}, {**BODY, "max_tokens": 50, "stream": True}):
        with several.connect() as client:
            client.sendall(http("/v1/completions", body))
            if "stream" in body:
                assert client.recv(10)
        wait_until(several.is_idle)


def test_what_those_who_run_it_see(several: Served) -> None:
    assert several.get("/health")[:2] == several.get("/ready")[:2] == (200, {"status": "ready"})
    status, told, _ = several.get("/stats")
    assert (status, told["model"], len(set(told["api_processes"]))) == (200, "tiny", 2)
    assert {"load", "engine", "defaults"} <= set(told)
    before = metrics(several)
    for _ in range(6):  # of both processes
        assert several.post("/v1/completions", BODY)[0] == 200
    after = metrics(several)
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 24
    assert after["piecegraph:steps_total"] > before["piecegraph:steps_total"]


def test_limits_are_those_of_all_together(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny, max_queue=2, timeout_s=20, api_processes=2, api_keys=("k",)) as running:
        assert running.post("/v1/completions", BODY)[0] == 401
        found: list[Any] = []

        def ask() -> None:
            found.append(running.post("/v1/completions", BODY, Authorization="Bearer k"))

        with held(tiny, monkeypatch) as gate:
            threads = [threading.Thread(target=ask) for _ in range(14)]
            for thread in threads:
                thread.start()
            wait_until(lambda: len(found) >= 2)  # at most 10 have a place or wait for one behind them, and 2 wait
            gate.set()
            for thread in threads:
                thread.join(60)
    assert {status for status, _, _ in found} == {200, 429}
    refusal = next(each for each in found if each[0] == 429)
    assert (refusal[1]["error"]["code"], refusal[2]["retry-after"]) == ("queue_full", "1")


def test_requests_that_take_too_long(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny, timeout_s=0.05, api_processes=1) as running, held(tiny, monkeypatch) as gate:
        threading.Timer(0.3, gate.set).start()
        status, answer, _ = running.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (504, "timeout")


def test_models_come_and_go(tiny: piecegraph.LLM, tmp_path: Path) -> None:
    second = piecegraph.LLM(
        write_tiny_llm(tmp_path, seed=1), backend="eager", device="cpu", max_num_seqs=4, options={"progress": False}
    )
    expected = second.generate("ax by", max_new_tokens=4)[0].text

    def load(spec: ModelSpec) -> AsyncLLM:
        return AsyncLLM(second if spec.name == "second" else tiny)

    with served(tiny, load=load, api_processes=2, admin_keys=("admin",)) as running:
        wait_until(lambda: running.get("/ready")[0] == 200)
        body = {"model": "second", "path": "second"}
        assert running.post("/v1/models/load", body)[0] == 401
        assert running.post("/v1/models/load", body, **ADMIN)[1]["status"] == "ready"
        assert running.post("/v1/models/load", body, **ADMIN)[0] == 409
        for _ in range(6):  # whichever process it comes to
            found = running.post("/v1/completions", {**BODY, "model": "second"})[1]
            assert found["choices"][0]["text"] == expected
        assert running.post("/v1/models/unload", {"model": "second"}, **ADMIN)[0] == 200
        assert {running.post("/v1/completions", {**BODY, "model": "second"})[0] for _ in range(6)} == {404}


def test_an_api_process_that_is_killed(
    tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tiny.generate("ax by", max_new_tokens=20)[0].text
    with served(tiny, api_processes=2) as running, contextlib.ExitStack() as stack:
        with held(tiny, monkeypatch) as gate:
            clients = [stack.enter_context(running.connect()) for _ in range(8)]
            for client in clients:
                client.sendall(http("/v1/completions", {**BODY, "max_tokens": 20}))
            wait_until(lambda: running.service.llm.load().num_waiting == 8)  # type: ignore[attr-defined]
            before = pids(running)
            os.kill(before[0], signal.SIGKILL)
            wait_until(lambda: len(set(pids_or_none(running)) - set(before)) == 1)
            gate.set()
        answers = [read_all(client) for client in clients]
        # Those of the other process are answered; the system may have given all connections to one of them.
        assert all(expected.encode() in each for each in answers if each)
        wait_until(running.is_idle)
        assert len(pids(running)) == 2
        assert {running.post("/v1/completions", BODY)[0] for _ in range(6)} == {200}
    assert "ended with -9; its requests were ended, and another takes its place" in caplog.text


def pids_or_none(running: Served) -> list[int]:
    try:
        return pids(running)
    except OSError:  # it came to the one that is gone
        return []


def read_all(client: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while not found.endswith(b"}") and (new := client.recv(65536)):
            found += new
    return found


def test_api_processes_that_cannot_run(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: raised.append(told.exc_value))
    monkeypatch.setattr(launch, "run", os._exit)  # of arguments that it does not take
    with served(tiny, load=lambda _: AsyncLLM(tiny), api_processes=1) as running:
        wait_until(lambda: running.server.should_exit)
    assert [type(each) for each in raised] == [CommandError]
    assert "PG617 API process 0" in str(raised[0])


def test_an_engine_that_is_gone(tiny: piecegraph.LLM) -> None:
    """The test is the engine: it takes a request, sends a token, and goes."""
    ours, theirs = socket.socketpair()
    asked: list[Message] = []

    async def run(address: tuple[str, int]) -> bytes:
        link = Link(ours)
        link.listen(asked.append, lambda: None)
        facts = tiny.started.loaded
        about = {"path": tiny.path, "tokenizer_path": facts.tokenizer_path, "is_local": True, "max_model_len": 64}
        about |= {"longest": 64, "vocab_size": 26, "defaults": {}, "response_template": None}
        link.send(("model", "tiny", 0, "ready", about), ("accept",))
        while ("has", "tiny") not in asked:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(http("/v1/completions", {**BODY, "stream": True}))
        while asked[-1][0] != "ask":
            await asyncio.sleep(0.01)
        number = asked[-1][1]
        link.send(("taken", number, None), ("news", [(number, 0, [7], None, None)]))
        text = await reader.readuntil(b"data: ")
        link.close()
        text += await reader.read()
        writer.close()
        return text

    with listen("127.0.0.1", 0) as listening:
        launch.start_early()
        process = launch.FORKS.Process(target=launch.run, args=(0, listening, theirs, ServeSettings(), False))
        process.start()
        theirs.close()
        text = asyncio.run(asyncio.wait_for(run(listening.getsockname()), 60))
    assert b"PG650 the engine has ended: its process is gone" in text
    process.join(30)
    assert process.exitcode == 1


def test_messages_that_are_larger_than_what_the_system_takes() -> None:
    """From several threads, to an end that is slow to read."""
    sent = [("news", number, "x" * size) for number, size in enumerate((3, 10**6, 5, 2 * 10**6, 0))]

    async def run() -> list[Message]:
        received: list[Message] = []
        ends, ours, theirs = list[str](), *map(Link, socket.socketpair())
        ours.listen(received.append, lambda: None)
        await asyncio.to_thread(lambda: [ours.send(each) for each in sent])  # nobody reads yet
        ours.post(("posted", 1))
        ours.post(("posted", 2))
        await asyncio.sleep(0)
        theirs.listen(received.append, lambda: ends.append("end"))
        while len(received) < len(sent) + 2:
            await asyncio.sleep(0.001)
        ours.close()
        while not ends:
            await asyncio.sleep(0.001)
        assert not ours.send(("late",))
        return received

    assert asyncio.run(asyncio.wait_for(run(), 30)) == [*sent, ("posted", 1), ("posted", 2)]


def test_what_passes_between_processes() -> None:
    params = SamplingParams(
        max_new_tokens=9,
        n=2,
        logit_bias={3: 1.5},
        bad_words=[[1, 2]],
        structured_outputs={"choice": ["a", "b"]},
        stop_token_ids=[4],
        logprobs=0,
    )
    asked = Asked(params=params, priority=-1, arrival_time=1.5, deadline=None, is_streamed=False)
    assert asked_from_wire(marshal.loads(marshal.dumps(asked_to_wire(asked)))) == asked
    for error in (
        RequestError("PG658", "the queue is full", why="so", hint="wait"),
        ConfigError("PG108", "n is 0", where="prompts[1]"),
    ):
        found = error_from_wire(marshal.loads(marshal.dumps(error_to_wire(error))))
        assert (type(found), str(found), found.code) == (type(error), str(error), error.code)
    metrics = refused([1], RequestError("PG651", "the prompt is empty")).metrics
    logprobs = [TokenLogprob(1, -0.5, ((2, -0.25),)), None]
    hidden = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    ending = Ending(
        finish_reason="stop",
        stop_reason=4,
        error=None,
        metrics=metrics,
        ends_with_mark=True,
        prompt_logprobs=logprobs,
        hidden_states=hidden,
    )
    ((key, index, tokens, *details),) = marshal.loads(
        marshal.dumps(news_to_wire([(7, 1, [5, 6], logprobs[:1], ending)]))
    )
    assert (key, index, tokens) == (7, 1, [5, 6])
    told, ended = details_from_wire(*details)
    assert told == logprobs[:1]
    assert isinstance(ended, Ending)
    assert torch.equal(ended.hidden_states, hidden)
    assert replace(ended, hidden_states=None) == replace(ending, hidden_states=None)
