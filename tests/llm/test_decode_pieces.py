"""The pieces that steps of decoding run: what becomes part of what, and that nothing is computed differently."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from piecegraph import LLM
from piecegraph.errors import ConfigError
from piecegraph.llm import SamplingParams
from piecegraph.llm.kernels import fused_linear, skinny
from piecegraph.llm.kernels.decode_pieces import most_rows, use_fused_ops
from tests.cases.llm_shelf import Shelf
from tests.graph.test_trace import trace_it


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(8)
        self.both, self.down = (nn.Linear(*sizes, bias=False, dtype=torch.bfloat16) for sizes in ((8, 24), (12, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(self.norm(x)).split([12, 12], -1)
        return x + self.down(F.silu(gate.contiguous()) * up.contiguous())


def fused(module: nn.Module, x: torch.Tensor) -> tuple[torch.fx.GraphModule, tuple[Any, ...]]:
    """What the pass makes of a traced module, and what it is called with."""
    traced = trace_it(module, x)
    inputs = [traced.inputs[node] for node in traced.graph.nodes if node.op == "placeholder"]
    arguments = tuple(getattr(source, "tensor", x) for source in inputs)
    return use_fused_ops(torch.fx.GraphModule(module, traced.graph)), arguments


def targets(module: torch.fx.GraphModule) -> Counter[str]:
    return Counter(str(node.target) for node in module.graph.nodes if node.op in ("call_function", "call_method"))


def test_a_layer_becomes_two_ops() -> None:
    layer, x = Layer(), torch.randn(3, 8, dtype=torch.bfloat16)
    made, arguments = fused(layer, x)
    assert targets(made) == {"piecegraph.fused_linear.default": 2}
    torch.testing.assert_close(made(*arguments)[0], layer(x), rtol=2e-2, atol=2e-2)


def test_what_others_use_stays() -> None:
    class Shown(Layer):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            normed = self.norm(x)
            both = self.both(normed)
            return normed, both, x + self.down(both[..., :12])

    made, arguments = fused(Shown(), torch.randn(3, 8, dtype=torch.bfloat16))
    found = targets(made)
    assert found["piecegraph.fused_linear.default"] == 2
    assert found["pow"] == 1, "the norm is a result"
    assert len(made(*arguments)) == 3


@pytest.mark.parametrize("change", ["gelu", "half", "eps", "mean", "in place"])
def test_what_only_looks_alike_is_left_to_the_compiler(change: str) -> None:
    class Other(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.to(torch.float32)
            scale = wide.abs() if change == "mean" else wide.pow(2)
            root = torch.rsqrt(scale.mean(-1, keepdim=True) + (wide[..., :1].abs() if change == "eps" else 1e-6))
            normed = self.norm.weight * (wide * root).to(x.dtype)
            if change == "in place":
                normed = normed.mul_(2)
            gate, up = self.both(normed).split([8, 16] if change == "half" else [12, 12], -1)
            gate = F.gelu(gate) if change == "gelu" else F.silu(gate)
            up = up[..., :8] if change == "half" else up
            return x + F.linear(gate * up, self.down.weight[:, : up.shape[-1]])

    torch.manual_seed(0)
    layer, x = Other(), torch.randn(3, 8, dtype=torch.bfloat16)
    made, arguments = fused(layer, x)
    torch.testing.assert_close(made(*arguments)[0], layer(x), rtol=2e-2, atol=2e-2)
    found = targets(made)
    if change in ("gelu", "half"):
        assert found["split"] == 1
    else:
        assert sum(count for name, count in found.items() if "rsqrt" in name) == 1
    assert found["piecegraph.fused_linear.default"] == (0 if change == "in place" else 2)


def test_of_two_linears_that_are_added_up_the_first_adds() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(x)

    module, x = Sum(), torch.randn(3, 8)
    made, arguments = fused(module, x)
    assert targets(made) == {"piecegraph.fused_linear.default": 2}
    torch.testing.assert_close(made(*arguments)[0], module(x))


def test_of_a_wide_model_fewer_rows_are_run_so() -> None:
    """cuBLAS is best for some of its linears from 17 rows on."""

    class Wide(nn.Module):
        def __init__(self, columns: int, depth: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(columns, depth, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return residual + F.linear(x, self.weight)

    found = []
    for columns, depth in ((1024, 3072), (4096, 14336)):
        given = (torch.empty(2, size, dtype=torch.bfloat16) for size in (depth, columns))
        found.append(most_rows(trace_it(Wide(columns, depth), *given).graph))
    assert found == [64, 16]


@pytest.mark.parametrize("has_norm", [False, True])
def test_the_plain_forms_compute_the_same(has_norm: bool) -> None:
    """They stand in repros, where piecegraph is not installed."""
    torch.manual_seed(0)
    x, weight, gain = torch.randn(1, 3, 8), torch.randn(6, 8), torch.rand(8) if has_norm else None
    for gated in (False, True):
        residual = torch.randn(1, 3, 3 if gated else 6)
        given: tuple[Any, ...] = (x, weight, None, gain, 1e-6, residual, gated, True)
        found = eval(fused_linear._PLAIN_LINEAR)(*given)
        torch.testing.assert_close(found, torch.ops.piecegraph.fused_linear(*given))


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_a_model_answers_as_transformers_does(models: Shelf, family: str) -> None:
    """Steps of two sequences, then of one; what is matched differs by family."""
    llm = models.load(family, options={"decode_pieces": True})
    prompts, lengths = [[3, 1, 4, 1, 5], [2, 7]], (4, 8)
    answers = llm.generate(prompts, [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in lengths])
    for prompt, length, answer in zip(prompts, lengths, answers, strict=True):
        assert answer.token_ids == models.greedy(family, prompt, length)
    told = [line for line in llm.explain().splitlines() if "pieces of decode steps: their own" in line]
    assert len(told) == 1
    assert "norms" in told[0]
    assert "residuals" in told[0]
    llm.close()


def test_a_wrong_wish_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode_pieces"):
        LLM("demo", options={"decode_pieces": "some"})


def test_a_row_too_many_is_computed_plainly() -> None:
    x, weight = torch.randn(40, 8), torch.randn(4, 8)
    torch.testing.assert_close(skinny.multiply(x, skinny.Linear(weight)), x @ weight.t())
