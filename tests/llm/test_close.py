"""A language model that is closed gives everything back."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.errors import ConfigError, ModelError
from piecegraph.llm import startup
from tests.cases.byte_llm import write_byte_llm
from tests.cases.checkpoints import save_checkpoint
from tests.cases.held import Held, without_collector

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_byte_llm(tmp_path_factory.mktemp("model"))


def test_close_gives_everything_back(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path)
    with piecegraph.LLM(tmp_path, backend="eager", options={"graph_device": "simulated"}, capture_sizes=[4]) as llm:
        kept = [weakref.ref(llm.started.loaded.model), weakref.ref(llm.started.engine)]
        stream = llm.generate([PROMPT, PROMPT], max_new_tokens=100, ignore_eos=True, stream=True)
        next(stream)
    assert [each() for each in kept] == [None, None]
    left = list(stream)
    assert [chunk.finished.finish_reason for chunk in left if chunk.finished is not None] == ["abort", "abort"]
    llm.close()
    for call in (lambda: llm.generate(PROMPT), lambda: llm.generate(PROMPT, stream=True), llm.explain, llm.stats):
        with pytest.raises(ConfigError, match=r"PG106 the model was called after close\(\)"):
            call()


CALLS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    {"stream": True},
    {"structured_outputs": {"regex": "a+"}},
    {},  # its last step was launched ahead
]


@pytest.mark.parametrize("device", ["auto", "simulated"])
def test_a_model_that_nobody_holds_keeps_no_memory(device: str, folder: str) -> None:
    """The cache takes what is left of a device: who loads a second model cannot wait for a garbage collection."""
    llm = piecegraph.LLM(
        folder, backend="eager", capture_sizes=[2, 16], options={"graph_device": device, "look_ahead": True}
    )
    with without_collector():  # what Dynamo leaves behind lies in circles, with the frames of whoever called it
        for call in CALLS:
            list(llm.generate([PROMPT, PROMPT], max_new_tokens=4, ignore_eos=True, **call))
        llm.explain()
        forward = llm.started.engine.forward
        named = {"the cache": forward.step._memory, "buffers": forward.step._buffers, "engine": llm.started.engine}
        tapes = forward.library.tapes.values()
        assert bool(tapes) == (device == "simulated")
        held = Held(named, weight=llm.started.loaded.model.parameters(), tape=tapes)
        del llm, forward, named, tapes
        assert held.left() == set()


def test_a_device_without_room_is_told(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB free. Of the allocated memory 4 GiB is used."

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError(said)

    monkeypatch.setattr(startup, "load", fail)
    with pytest.raises(ModelError, match=r"PG665 there is no room for the model on cpu: CUDA .* 1 GiB free\. hint"):
        piecegraph.LLM(folder, backend="eager")
