"""What nobody holds any more leaves the GPU at once, also while the GPU is still at work with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from tests.cases.held import Held, without_collector
from tests.cases.llms import tiny_model
from tests.cases.modules import Stack, attention

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
PROMPTS = [[3, 4, 5, 6], [7]]


def load(folder: Path, **arguments: Any) -> piecegraph.LLM:
    limits: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_batch_tokens": 32, "capture_sizes": [4, 32]}
    return piecegraph.LLM(str(folder), device="cuda", **limits, **arguments)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_language_model(backend: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    llm = load(tmp_path, backend=backend)
    with without_collector():
        for sampling in ({}, {"temperature": 0.7, "top_p": 0.9}, {"logprobs": 2}, {"logit_bias": {7: 3.0}}):
            llm.generate(PROMPTS, max_new_tokens=8, ignore_eos=True, **sampling)
        llm.explain()
        forward = llm.started.engine.forward
        tapes, weights = forward.library.tapes.values(), llm.started.loaded.model.parameters()
        held = Held({"the cache": forward.step._memory}, weight=weights, tape=tapes)
        del llm, forward, tapes, weights
        assert held.left() == set()


def test_an_earlier_model_in_a_circle(tmp_path: Path) -> None:
    """The next one does not find its place taken."""
    tiny_model("llama").save_pretrained(tmp_path)
    llm: Any = load(tmp_path, backend="eager")
    with without_collector():
        llm.itself = llm
        held = Held({"the cache": llm.started.engine.forward.step._memory})
        del llm
        assert held.left() == {"the cache"}
        load(tmp_path, backend="eager")
        assert held.left() == set()


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
def test_a_compiled_module(frontend: Any) -> None:
    model = Stack(attention).to(CUDA).eval()
    fast = piecegraph.compile(
        model, frontend=frontend, splitting_ops=[attention], capture_sizes=[16, 8], backend="eager"
    )
    with torch.inference_mode():
        fast(torch.randn(16, 12, device=CUDA))
        with without_collector():
            for rows in (16, 5, 8):
                fast(torch.randn(rows, 12, device=CUDA))
            held = Held({"the model": model}, tape=fast._engine.recorded.tapes(), weight=model.parameters())
            del fast, model
            assert held.left() == set()


def test_a_graph_that_still_runs() -> None:
    """Its memory is given to others only when it has ended."""

    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            x = x @ x
            x = x / x.abs().max()
        return x

    x = torch.randn(4096, 4096, device=CUDA)
    with torch.inference_mode():
        expected = many(x)
        for _ in range(3):
            fast = piecegraph.compile(many, backend="eager")
            fast(x)
            torch.cuda.synchronize()
            found = fast(x)
            is_running = not torch.cuda.current_stream().query()
            del fast
            torch.cuda.empty_cache()
            others = [torch.full((2**24,), float("nan"), device=CUDA) for _ in range(20)]
            assert is_running
            assert torch.equal(found, expected)
            del others, found
