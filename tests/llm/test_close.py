"""A language model that is closed gives everything back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

import piecegraph
from piecegraph.errors import ConfigError
from tests.cases.checkpoints import save_checkpoint

PROMPT = [5, 6, 7]


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


def test_a_model_that_nobody_holds_keeps_no_memory(tmp_path: Path) -> None:
    """The cache takes what is left of a device: who loads a second model cannot wait for a garbage collection."""
    save_checkpoint("llama", tmp_path)
    llm = piecegraph.LLM(tmp_path, backend="eager")
    llm.generate(PROMPT, max_new_tokens=2)
    step = llm.started.engine.forward.step
    held = [weakref.ref(each) for each in (step._memory, step._buffers)]
    gc.collect()  # what loading left behind
    gc.disable()
    try:
        del llm, step
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()
