"""``deterministic=True`` on a GPU: the same bits alone and in batches, captured and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import piecegraph
import piecegraph.llm.kernels.linear
from piecegraph.errors import ModelError
from piecegraph.llm.kernels.attention import triton_paged
from tests.cases.attention import check, layer
from tests.cases.llms import tiny_model
from tests.gpu.test_gpu_attention import CUDA, MIXED

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i * length) % 120 + 4 for i in range(length)] for length in (5, 21, 9, 70, 1, 33, 40)]
SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 5, "max_batch_tokens": 48}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("columns", "depth"), [(4096, 1024), (1000, 72), (64, 9000)])
def test_a_row_of_a_linear_is_the_same_wherever_it_is(columns: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(size, depth, device="cuda", dtype=dtype) for size in (300, columns))
    bias = torch.randn(columns, device="cuda", dtype=dtype)
    found = torch.ops.piecegraph.fixed_linear(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert (found.double() - expected).norm() <= (1e-5 if dtype == torch.float32 else 4e-3) * expected.norm()
    for rows in (1, 2, 17, 64, 65, 299):
        order = torch.randperm(300, device="cuda")[:rows]
        assert torch.equal(torch.ops.piecegraph.fixed_linear(x[order], weight, bias), found[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("features", [{}, {"window": 50}, {"softcap": 3.0}, {"has_sinks": True}], ids=str)
def test_fixed_attention_matches_the_definition(features: dict[str, Any], dtype: torch.dtype) -> None:
    check(triton_paged.FIXED_KERNEL, layer(8, 2, 64, **features), MIXED, dtype, device=CUDA)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_bit_is_the_same_alone_and_in_batches(family: str, backend: str, tmp_path: Path) -> None:
    tiny_model(family).to(torch.bfloat16).save_pretrained(tmp_path)

    def answers(llm: Any, which: list[int]) -> dict[int, Any]:
        found = llm.generate(
            [PROMPTS[i] for i in which],
            max_new_tokens=16,
            ignore_eos=True,
            temperature=[0.0 if i % 2 else 1.1 for i in which],
            seed=which,
            logprobs=2,
            return_hidden_states=True,
        )
        assert all(answer.error is None for answer in found)
        told = [(answer.token_ids, answer.logprobs, answer.hidden_states.tolist()) for answer in found]
        return dict(zip(which, told, strict=True))

    with piecegraph.LLM(str(tmp_path), deterministic=True, backend=backend, **SETTINGS) as llm:
        assert {mode.choice for mode in llm.started.engine.forward.modes.values()} == {"full"}
        alone = {i: answers(llm, [i])[i] for i in range(len(PROMPTS))}
        for which in ([1, 0], [4, 3, 2], [6, 5, 4, 3, 2, 1, 0], [3, 3, 1, 3, 0]):
            together = answers(llm, which)
            assert all(together[i] == alone[i] for i in which), which
        assert llm.stats()["coverage"] == 1.0
    with piecegraph.LLM(str(tmp_path), deterministic=True, backend=backend, cudagraph_mode="none", **SETTINGS) as plain:
        assert answers(plain, list(alone)) == alone


def test_products_that_are_no_linears_are_refused(tmp_path: Path) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="PG668 .*is a product that is no linear"):
        piecegraph.LLM(str(tmp_path), deterministic=True, backend="eager", **SETTINGS)
