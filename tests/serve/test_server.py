"""What every request passes, and what those who run a server see."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import piecegraph
from piecegraph.errors import CommandError, ConfigError, ModelError
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.serve import guards, protocol
from piecegraph.serve.listening import listen
from piecegraph.serve.settings import ServeSettings
from tests.cases.serving import Served, http, served

BODY = {"model": "tiny", "prompt": "ax by", "max_tokens": 4, "temperature": 0}
KEY = "a-key-that-is-secret"


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def held(llm: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No step is run before the event is set."""
    engine, gate = llm.started.engine, threading.Event()
    step = engine.step

    def gated() -> bool:
        assert gate.wait(60)
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", gated)
        try:
            yield gate
        finally:
            gate.set()


def test_what_those_who_run_it_see(running: Served, tiny: piecegraph.LLM) -> None:
    assert running.get("/health")[:2] == (200, {"status": "ready"})
    assert running.get("/ready")[:2] == (200, {"status": "ready"})
    assert running.get("/version")[1] == {"version": piecegraph.__version__}
    before = metrics(running)
    status, answer, headers = running.post("/v1/completions", BODY)
    assert (status, answer["choices"][0]["text"]) == (200, tiny.generate("ax by", max_new_tokens=4)[0].text)
    assert answer["id"].endswith(headers["x-request-id"])
    assert "access-control-allow-origin" not in headers
    after = metrics(running)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == 2
    assert grown["vllm:generation_tokens_total"] == 4
    assert grown["vllm:time_to_first_token_seconds_count"] == 1
    assert grown["piecegraph:steps_total"] >= 4
    assert (after["vllm:num_requests_running"], after["vllm:kv_cache_usage_perc"]) == (0, 0)
    assert {"piecegraph:recorded_sizes", "piecegraph:padding_tokens_total", "vllm:num_preemptions_total"} <= set(after)


def test_what_is_asked_of_prompts_alone_generates_nothing(running: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "piecegraph.serve.requests")
    before = metrics(running)
    alone = {**BODY, "max_tokens": 0, "echo": True, "logit_bias": {"2": 100}}
    for path, body in (
        ("/v1/completions", alone),
        ("/v1/completions", {**alone, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {**alone, "logprobs": 1, "n": 2}),
        ("/v1/embeddings", {"model": "tiny", "input": ["ax by", "cz"]}),
    ):
        status, answer, _ = running.post(path, body)
        assert status == 200
        assert '"completion_tokens":0' in answer if body.get("stream") else answer["usage"]["prompt_tokens"] in (2, 3)
    after = metrics(running)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["vllm:generation_tokens_total"] == grown["vllm:request_generation_tokens_sum"] == 0
    assert grown["vllm:time_to_first_token_seconds_count"] == 0
    assert grown["vllm:prompt_tokens_total"] == 2 + 2 + 2 * 2 + 3
    assert grown["vllm:request_success_total"] == 6
    assert {json.loads(record.message)["new_tokens"] for record in caplog.records} == {0}


def metrics(running: Served) -> dict[str, float]:
    """Sums over all labels."""
    found: dict[str, float] = {}
    for line in running.get("/metrics")[1].splitlines():
        if not line.startswith("#"):
            name, value = line.rpartition(" ")[0].partition("{")[0], float(line.rpartition(" ")[2])
            found[name] = found.get(name, 0) + value
    return found


def test_tokens_and_texts(running: Served, tiny: piecegraph.LLM) -> None:
    ids = tiny.tokenizer("ax by")["input_ids"]
    expected = {"tokens": ids, "count": 2, "max_model_len": 64}
    assert running.post("/tokenize", {"prompt": "ax by"})[:2] == (200, expected)
    messages = [{"role": "user", "content": "ax by"}]
    assert running.post("/tokenize", {"messages": messages})[1]["tokens"] == tiny.chat_prompt("ax by")
    assert running.post("/detokenize", {"tokens": ids})[:2] == (200, {"prompt": "ax by"})
    for path, body in (
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [999]}),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"x": 1}}),
        ("/tokenize", {"messages": messages, "add_special_tokens": False}),
        ("/tokenize", {"prompt": "a", "model": "b"}),
    ):
        assert running.post(path, body)[0] in (400, 404)


def test_bodies_that_cannot_be_read(running: Served) -> None:
    for body, code in (
        (b"{", "invalid_json"),
        (b"", "missing"),
        (b"[]", "invalid_value"),
        (b'{"model": "tiny"}', "missing"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "PG653"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "invalid_json"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "invalid_json"),
        (b'{"model": "tiny", "prompt": "a", "seed": %s}' % (b"1" * 5000), "invalid_json"),
        (b'{"model": "tiny", "prompt": "a", "temperature": "hot"}', "invalid_value"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
    ):
        status, answer, _ = running.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, code), body[:60]
    assert running.get("/nothing")[0] == 404
    assert running.get("/v1/completions")[0] == 405
    assert running.is_idle()


def test_names_that_come_twice(running: Served) -> None:
    plain = json.dumps(BODY)[:-1]
    for more, place in (
        (', "max_tokens": 7}', "max_tokens"),
        (', "n": 1, "n": true}', "n"),
        (', "structured_outputs": {"json": {"not": {"a": {}, "a": true}}}}', "structured_outputs.json.not.a"),
        (', "logit_bias": {"7": 1, "7": 2}}', "logit_bias.7"),
        (', "logit_bias": {"7": 1, "07": 2}}', "logit_bias"),
    ):
        status, answer, _ = running.post("/v1/completions", (plain + more).encode())
        assert (status, answer["error"]["param"]) == (400, place)
        assert "twice, with different values" in answer["error"]["message"]
    for more in (', "max_tokens": 4}', ', "logit_bias": {"7": 1, "07": 1, "7": 1}}'):  # which say one thing
        assert running.post("/v1/completions", (plain + more).encode())[0] == 200


def test_methods_of_a_path(running: Served) -> None:
    for path, method, allowed in (
        ("/v1/completions", "GET", "POST"),
        ("/health", "POST", "GET"),
        ("/openapi.json", "POST", "GET, HEAD"),
        ("/v1/models/load", "PUT", "GET, POST"),  # which may be a model's name
    ):
        with running.connect() as client:
            client.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            head = client.recv(4096).decode().partition("\r\n\r\n")[0].split("\r\n")
        assert head[0].startswith("HTTP/1.1 405 ")
        assert f"allow: {allowed}" in head


def test_keys(tiny: piecegraph.LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "piecegraph")
    with served(tiny, api_keys=("another", KEY)) as running:
        assert running.get("/health")[0] == running.get("/ready")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"x-api-key": KEY[:-1]}):
            status, answer, told = running.post("/v1/completions", BODY, **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert told["www-authenticate"] == "Bearer"
            assert running.get("/metrics", **headers)[0] == 401
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": "another"}):
            assert running.post("/v1/completions", BODY, **headers)[0] == 200
    assert KEY not in caplog.text
    assert KEY[:-1] not in caplog.text


def test_bodies_that_are_too_large_or_too_slow(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_BODY_S", 0.2)
    with served(tiny, max_body_bytes=1000) as running:
        status, answer, _ = running.post("/v1/completions", {**BODY, "prompt": "ax " * 1000})
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        with running.connect() as client:  # one that does not say how long it is
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.sendall(head.encode() + b"7d0\r\n" + b" " * 2000 + b"\r\n")
            assert b" 413 " in client.recv(4096)
        with running.connect() as client:
            client.sendall(http("/v1/completions", BODY)[:-5])
            assert b" 408 " in client.recv(4096)
        assert running.post("/v1/completions", BODY)[0] == 200


def test_pages_of_other_sites(running: Served, tiny: piecegraph.LLM) -> None:
    port = running.address.rpartition(":")[2]
    for host in (
        "site.example",
        f"site.example:{port}",
        "localhost.site.example",
        "127.0.0.1.site.example",
        "[",
        "10.0.0.1",
    ):
        for path in ("/v1/completions", "/v1/messages"):
            status, answer, _ = running.post(path, BODY, Host=host)
            assert (status, "Host header" in answer["error"]["message"]) == (403, True), host
        assert running.get("/", Host=host)[0] == running.get("/stats", Host=host)[0] == 403
    for host in ("localhost", f"LOCALHOST:{port}", "127.0.0.1", f"[::1]:{port}", "127.1.2.3"):
        assert running.post("/v1/completions", BODY, Host=host)[0] == 200, host
    # A page may send a text to any server, without asking first.
    assert running.post("/v1/completions", BODY, **{"Content-Type": "text/plain"})[0] == 400
    with running.connect() as client:
        client.sendall(b"GET /stats HTTP/1.1\r\nHost: localhost\r\nHost: site.example\r\n\r\n")
        assert b" 403 " in client.recv(4096)
    with served(tiny, api_keys=(KEY,)) as other:  # which no page has
        assert other.post("/v1/completions", BODY, Host="site.example", Authorization=f"Bearer {KEY}")[0] == 200


def test_bodies_that_trickle(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_BODY_S", 0.3)
    monkeypatch.setattr(protocol, "_LINGER_S", 0.1)
    with served(tiny) as running, running.connect() as client:
        client.sendall(http("/v1/completions", {**BODY, "prompt": "x" * 10_000})[:-9_000])
        assert trickled(client, b"x") == 408


def test_headers_that_trickle(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_HEAD_S", 0.3)
    with served(tiny) as running:
        for begin, more, status in (
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b"x", 408),
            (b"", b"\r\n", 0),  # which come before a request
        ):
            with running.connect() as client:
                client.sendall(begin)
                assert trickled(client, more) == status
        with running.connect() as client:  # the one before is answered, though its successor never comes
            client.sendall(http("/v1/completions", {**BODY, "stream": True}) + b"GET /")
            text = b""
            while new := client.recv(4096):
                text += new
            assert b"[DONE]" in text


def trickled(client: socket.socket, more: bytes) -> int:
    """Send a little until the connection is closed; the status of what was answered, 0 for nothing."""
    client.settimeout(0.02)
    found, end = b"", time.monotonic() + 30
    while time.monotonic() < end:
        try:
            client.sendall(more)
            new = client.recv(4096)
        except TimeoutError:
            continue
        except ConnectionError:
            break
        if not new:
            break
        found += new
    else:
        raise AssertionError("the connection is still there")
    return int(found.split()[1]) if found else 0


def test_headers_that_do_not_end(running: Served) -> None:
    with running.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(100):
            client.sendall(b"x" * 1000)
            time.sleep(0.001)
            if select.select([client], [], [], 0)[0]:
                break
        assert b" 431 " in client.recv(4096)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("is_url", [False, True])
def test_headers_that_are_too_large(running: Served, num_parts: int, *, is_url: bool) -> None:
    def head(size: int) -> bytes:
        begin, end = ("GET /health?", " HTTP/1.1\r\n") if is_url else ("GET /health HTTP/1.1\r\nX: ", "\r\n")
        end += "Host: localhost\r\n\r\n"
        return (begin + "x" * (size - len(begin) - len(end)) + end).encode()

    for size, status in ((2**16, 200), (2**16 + 1, 431), (70_000, 431), (200_000, 431)):
        with running.connect() as client:
            sent = head(size)
            step = -(-len(sent) // num_parts)
            with contextlib.suppress(ConnectionError):  # it is refused before it has come to its end
                for start in range(0, len(sent), step):
                    client.sendall(sent[start : start + step])
                    time.sleep(0.01 * (num_parts - 1))
            assert int(client.recv(4096).split()[1]) == status, size


def test_what_is_no_http(running: Served) -> None:
    with running.connect() as client:
        client.sendall(b"\x16\x03\x01\r\n\r\n")
        head, _, body = client.recv(4096).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_what_is_refused_waits_for_the_answer_before(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny) as running, running.connect() as client:
        with held(tiny, monkeypatch):
            client.sendall(http("/v1/completions", BODY) + b"GET / HTTP/1.1\r\nX: ")
            for _ in range(10):
                client.sendall(b"x" * 10_000)
                time.sleep(0.005)
        text = b""
        with contextlib.suppress(ConnectionError):
            while new := client.recv(4096):
                text += new
        assert text.startswith(b"HTTP/1.1 200 ")
        assert text.count(b"HTTP/1.1") == 1


def test_connections_are_kept(running: Served) -> None:
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running.connect() as client:
        for sent, num_answers in ((health, 1), (http("/v1/completions", BODY), 1), (health + health, 2)):
            client.sendall(sent)
            text = b""
            while text.count(b"HTTP/1.1 200 OK") < num_answers or not text.endswith(b"}"):
                text += client.recv(4096)


def test_a_queue_that_is_full(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny, max_queue=2) as running:
        with held(tiny, monkeypatch) as gate:
            found: list[Any] = []
            threads = [
                threading.Thread(target=lambda: found.append(running.post("/v1/completions", BODY))) for _ in range(12)
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda: any(status == 429 for status, _, _ in found))
            gate.set()
            for thread in threads:
                thread.join(60)
        statuses = [status for status, _, _ in found]
        assert set(statuses) == {200, 429}
        refusal = next(each for each in found if each[0] == 429)
        assert refusal[1]["error"]["type"] == "rate_limit_error"
        assert refusal[1]["error"]["code"] == "queue_full"
        assert refusal[2]["retry-after"] == "1"


def test_a_request_that_takes_too_long(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tiny, timeout_s=0.05) as running, held(tiny, monkeypatch) as gate:
        threading.Timer(0.2, gate.set).start()
        status, answer, _ = running.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert "PG659" in answer["error"]["message"]


def test_it_answers_while_the_model_is_loaded(tiny: piecegraph.LLM) -> None:
    gate = threading.Event()

    def load(_: Any) -> AsyncLLM:
        assert gate.wait(60)
        return AsyncLLM(tiny)

    with served(tiny, load=load) as running:
        assert running.get("/health")[:2] == (200, {"status": "loading"})
        assert running.get("/ready")[:2] == (503, {"status": "loading"})
        status, answer, headers = running.post("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (503, "model_loading")
        assert headers["retry-after"] == "1"
        assert running.get("/metrics")[0] == 200
        gate.set()
        wait_until(lambda: running.get("/ready")[0] == 200)
        assert running.post("/v1/completions", BODY)[0] == 200


def test_a_model_that_cannot_be_loaded_ends_the_server(tiny: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: raised.append(told.exc_value))

    def load(_: Any) -> AsyncLLM:
        raise ModelError("PG661", "there is no model at nowhere")

    with served(tiny, load=load) as running:
        wait_until(lambda: running.server.should_exit)
    assert [type(each) for each in raised] == [ModelError]


def test_one_line_a_request(running: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "piecegraph.serve.requests")
    running.post("/v1/completions", BODY)
    running.post("/v1/completions", {**BODY, "top_p": 7})
    wait_until(lambda: len(caplog.messages) == 2)
    good, bad = (json.loads(line) for line in caplog.messages)
    assert (good["request"], good["status"], good["new_tokens"]) == ("POST /v1/completions", 200, 4)
    assert (good["finish"], good["prompt_tokens"]) == (["length"], 2)
    assert good["seconds"] >= good["first_token_seconds"] > 0
    assert bad["status"] == 400
    assert "top_p is 7" in bad["error"]
    assert "ax by" not in caplog.text


def test_curl(running: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    command = ["curl", "-sS", "-N", f"{running.address}/v1/completions", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps({**BODY, "stream": True})]
    events = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    text = "".join(json.loads(each.removeprefix("data: "))["choices"][0]["text"] for each in events[:-2])
    assert text == running.post("/v1/completions", BODY)[1]["choices"][0]["text"]


def test_the_schema_names_every_endpoint(running: Served) -> None:
    paths = running.get("/openapi.json")[1]["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"} <= set(paths)
    for page in ("/docs", "/redoc"):
        assert running.get(page)[0] == 404  # they would fetch scripts from elsewhere


def test_settings() -> None:
    assert not ServeSettings().is_open_to_others
    assert not ServeSettings(host="::1").is_open_to_others
    assert not ServeSettings(host="localhost").is_open_to_others
    assert not ServeSettings(host="0.0.0.0", api_keys=("k",)).is_open_to_others
    assert ServeSettings(host="0.0.0.0").is_open_to_others
    assert ServeSettings(host="machine.example").is_open_to_others
    with pytest.raises(ConfigError, match="PG101 an API key is empty"):
        ServeSettings(api_keys=(" ",))
    with listen("127.0.0.1", 0) as taken, pytest.raises(CommandError, match="PG614 .* cannot be listened at: address"):
        listen("127.0.0.1", taken.getsockname()[1])
