"""Several models in one server, chosen by name; loaded and unloaded while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import piecegraph
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.serve.catalog import ModelSpec
from tests.cases.serving import Served, http, served
from tests.cases.tiny_llm import write_tiny_llm
from tests.serve.test_server import BODY, held, wait_until

ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> piecegraph.LLM:
    folder = write_tiny_llm(tmp_path_factory.mktemp("other"), seed=1)
    return piecegraph.LLM(folder, backend="eager", device="cpu", max_num_seqs=4, options={"progress": False})


@pytest.fixture
def both(tiny: piecegraph.LLM, other: piecegraph.LLM) -> Iterator[Served]:
    def load(spec: ModelSpec) -> AsyncLLM:
        known = {"tiny": tiny, "other": other}
        return AsyncLLM(known.get(spec.path) or spec.path)

    with served(tiny, load=load, names=("tiny", "other"), admin_keys=("admin",)) as running:
        wait_until(lambda: running.get("/ready")[0] == 200)
        yield running


def text_of(running: Served, name: str) -> tuple[int, Any]:
    status, answer, _ = running.post("/v1/completions", {**BODY, "model": name})
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["code"]


def test_requests_choose_by_name(both: Served, tiny: piecegraph.LLM, other: piecegraph.LLM) -> None:
    texts = [llm.generate("ax by", max_new_tokens=4)[0].text for llm in (tiny, other)]
    assert texts[0] != texts[1]
    assert [text_of(both, name) for name in ("tiny", "other")] == [(200, text) for text in texts]
    assert text_of(both, "third") == (404, "model_not_found")
    cards = both.get("/v1/models")[1]["data"]
    assert [(card["id"], card["status"]) for card in cards] == [("tiny", "ready"), ("other", "ready")]
    assert both.get("/v1/models/other")[1] == cards[1]
    assert both.get("/stats")[1]["models"] == ["tiny", "other"]
    assert both.get("/stats?model=other")[1]["model"] == "other"
    page = both.get("/metrics")[1]
    for name in ("tiny", "other"):
        assert f'vllm:generation_tokens_total{{model_name="{name}"}} 4.0' in page
        assert f'vllm:num_requests_running{{model_name="{name}"}} 0.0' in page
    assert page.count("# TYPE vllm:num_requests_running ") == 1


def test_a_model_is_unloaded_when_its_requests_have_ended(
    both: Served, other: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    with held(other, monkeypatch) as gate, both.connect() as client:
        client.sendall(http("/v1/completions", {**BODY, "model": "other", "stream": True}))
        wait_until(lambda: both.server.models.find("other").llm.load().num_waiting > 0)
        unload = threading.Thread(
            target=lambda: found.append(both.post("/v1/models/unload", {"model": "other"}, **ADMIN))
        )
        unload.start()
        wait_until(lambda: both.get("/v1/models/other")[1]["status"] == "draining")
        assert text_of(both, "other") == (503, "model_draining")
        assert both.post("/v1/models/unload", {"model": "other"}, **ADMIN)[0] == 503
        assert both.get("/ready")[0] == text_of(both, "tiny")[0] == 200
        assert not found
        gate.set()
        text = b""
        while b"[DONE]" not in text:
            text += client.recv(65536)
        unload.join(60)
    assert found[0][:2] == (200, {"id": "other", "object": "model", "deleted": True})
    assert text.count(b'"finish_reason":"length"') == 1
    assert text_of(both, "other") == (404, "model_not_found")
    assert 'vllm:num_requests_running{model_name="other"}' not in both.get("/metrics")[1]
    status, card, _ = both.post("/v1/models/load", {"model": "again", "path": "other"}, **ADMIN)
    assert (status, card["id"], card["status"], card["max_model_len"]) == (200, "again", "ready", 64)
    assert text_of(both, "again")[0] == 200
    assert both.post("/v1/models/load", {"model": "again", "path": "other"}, **ADMIN)[0] == 409


def test_a_model_that_cannot_be_loaded(both: Served, tmp_path: Path) -> None:
    status, answer, _ = both.post("/v1/models/load", {"model": "third", "path": str(tmp_path / "nowhere")}, **ADMIN)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "PG661", "path")
    assert text_of(both, "third") == (404, "model_not_found")
    assert text_of(both, "tiny")[0] == 200
    assert both.post("/v1/models/unload", {"model": "third"}, **ADMIN)[0] == 404


def test_only_admins_load_and_unload(running: Served, tiny: piecegraph.LLM) -> None:
    for path in ("/v1/models/load", "/v1/models/unload", "/v1/models/load%0a", "/v1/models/x"):
        assert running.post(path, {"model": "tiny"}, **ADMIN)[1]["error"]["code"] == "no_admin"
    with served(tiny, api_keys=("key",), admin_keys=("admin",)) as other:
        for path in ("/v1/models/load", "/v1/models/unload", "/v1/models/unload%0a"):
            for headers in ({}, {"Authorization": "Bearer key"}):
                assert other.post(path, {"model": "tiny"}, **headers)[0] == 401
        assert other.post("/v1/completions", BODY, **ADMIN)[0] == 401
        assert other.post("/v1/completions", BODY, Authorization="Bearer key")[0] == 200
