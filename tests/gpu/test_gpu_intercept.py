"""Interceptions between real graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import piecegraph
from tests.cases.llms import tiny_model
from tests.engine.test_intercept import Model
from tests.gpu.test_gpu_llm import assert_same_but_for_ties

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"backend": "eager"},
        {"backend": "inductor"},
        {"backend": "inductor", "cudagraph_mode": "full"},
        {"frontend": "breakable"},
    ],
    ids=str,
)
def test_observe_replace_and_go_back(arguments: dict[str, Any]) -> None:
    model = Model().to(CUDA).eval()
    fast = piecegraph.compile(model, capture_sizes=[16, 4], on_fallback="raise", **arguments)
    inputs = [torch.randn(size, 4, device=CUDA) for size in (16, 4, 3, 1)]
    with torch.no_grad():
        before = [fast(x) for x in inputs]
        with piecegraph.intercept(F.gelu, before=lambda x: None) as observed:
            for x, expected in zip(inputs, before, strict=True):
                torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-4)
        assert observed.num_calls == 3 * len(inputs)
        compiles = fast.stats()["compiles"]
        with piecegraph.intercept(F.gelu, replace=torch.tanh, module="layers.1"):
            for _ in range(3):
                for x in inputs:
                    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
            assert fast.stats()["coverage"] == 1.0
        for x, expected in zip(inputs, before, strict=True):
            assert torch.equal(fast(x), expected)
        assert fast.stats()["compiles"] <= compiles + 2


@pytest.mark.parametrize("fuse_gates", [True, False])
def test_a_language_model_in_one_graph_is_cut_and_goes_back(fuse_gates: bool, tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    limits: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "max_batch_tokens": 32}
    limits |= {"capture_sizes": [1, 2, 8, 32], "options": {"fuse_gates": fuse_gates}}
    llm = piecegraph.LLM(str(tmp_path), device="cuda", backend="eager", **limits)

    def outputs() -> list[Any]:
        return llm.generate([list(range(3, 12)), [40, 41, 42]], max_new_tokens=8, ignore_eos=True, logprobs=4)

    def generate() -> list[list[int]]:
        return [out.token_ids for out in outputs()]

    plain = outputs()
    expected = [out.token_ids for out in plain]
    forward = llm.started.engine.forward
    assert {mode.choice for mode in forward.modes.values()} == {"full"}
    rows: list[int] = []
    with piecegraph.intercept(F.silu, after=lambda result, x: rows.append(len(x))) as handle:
        observed = generate()
        if fuse_gates:  # a gate is no part of its linear then, and rounds otherwise
            assert_same_but_for_ties(observed, plain)
        else:
            assert observed == expected
        assert handle.num_calls == len(rows) > 0
        assert {mode.choice for mode in llm.started.engine.forward.modes.values()} == {"piecewise"}
        assert "PG724" in llm.explain()
    with piecegraph.intercept(
        F.linear, module="lm_head", replace=lambda x, w, b=None: F.one_hot(torch.full(x.shape[:-1], 3), len(w)).to(x)
    ):
        assert generate() == [[3] * 8] * 2
    assert llm.started.engine.forward is forward
    assert generate() == expected
