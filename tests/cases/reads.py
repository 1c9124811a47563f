"""Functions that read data on the host, for a CPU and a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases.check import assert_same, clone_all

X = torch.arange(-3.0, 4.0)


def check_calls(fast: Any, function: Callable[..., Any], *calls: Any) -> None:
    """Results and arguments as those of the function; and earlier results stay what they were."""
    kept = []
    with torch.no_grad():
        for call in calls:
            inputs = clone_all(call if isinstance(call, tuple) else (call,))
            expected_inputs = clone_all(inputs)
            expected = function(*expected_inputs)
            found = fast(*inputs)
            assert_same(found, expected)
            assert_same(inputs, expected_inputs)
            kept.append((found, expected))
    for found, expected in kept:
        assert_same(found, expected)


def paths_of(fast: Any) -> dict[str, Any]:
    (plan,) = fast.stats()["plans"]
    (paths,) = plan["paths"].values()
    return paths


def branch(x: Tensor) -> Tensor:
    y = x * 2
    return y + 1 if y.sum() > 0 else (y - 1).relu()


def several(x: Tensor) -> tuple[Tensor, int]:
    """Three reads; the last two depend on the first."""
    if bool((x > 0).all()):
        return x.cumsum(0), int(x.argmax())
    n = int((x < 0).sum())
    return x[:n] * 2, n


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x * x.abs().max().item(),
    "number returned": lambda x: (x + 1, x.max().item(), {"n": int((x > 0).sum())}),
    "another structure": lambda x: (x, x + 1) if x.sum() > 0 else x - 1,
    "several": several,
    "tolist": lambda x: x * sum((x > 0).tolist()),
    "numpy": lambda x: x + float((x + 1).cpu().numpy().max()),
    "tensor of tensors": lambda x: torch.tensor([x.sum(), x.max() * 2], device=x.device) + 1,
    "nonzero": lambda x: (x * 2)[(x > 0).nonzero()[:, 0]].sin() + 1,
    "mask": lambda x: x[x > 0].exp() * 2,
    "written mask": lambda x: x.clone().index_put_((x > 0,), (x[x > 0] * 3)) + 1,
    "unique": lambda x: x.clamp(0).unique() * 2,
    "repeat_interleave": lambda x: x.repeat_interleave((x > 0).long()) + 1,
    "loop": lambda x: [x := x / 2 for _ in range(int((x > 1).sum()))] or [x],
    "equal": lambda x: x + 1 if torch.equal(x, x.abs()) else x - 1,
    "slices": lambda x: x[: (x > 0).sum()] + 1,
    "format": lambda x: (x * 2, f"{x.max():.1f}"),
    "not a number": lambda x: x + (1 if torch.log(x.min()).item() > 0 else 2),
}


class Counts(nn.Module):
    """Writes to a buffer, to its argument and to a cache before it reads, and more on one of the ways."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3, device=device))
        self.register_buffer("odd", torch.zeros(3, device=device))
        self.scale = torch.ones(1, device=device)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        self.count += 1
        self.scale *= 2
        x.add_(1)
        cache[0] += x.sum()
        if (x.sum() + self.count[0]) % 2 > 0:
            self.odd += x[:3]
            cache[1] += 1
            return x * self.count.sum()
        return x - self.odd.sum() * self.scale


def draws(x: Tensor) -> Tensor:
    y = x + torch.rand(3, device=x.device)
    if x.sum() > 0:
        y = y * torch.rand(3, device=x.device)
    return y + torch.randn(3, device=x.device)


def tiny(kind: str) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 64, "use_cache": False, "attn_implementation": "eager"}
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, **sizes
        )
        return transformers.LlamaModel(config)
    if kind == "bart":
        layers = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        ffn = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32}
        return transformers.BartModel(transformers.BartConfig(d_model=16, **layers, **ffn, **sizes))
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, **sizes)
    return transformers.T5Model(config)


def check_tiny(kind: str, attention: str, device: str, compile_model: Callable[[nn.Module], Any]) -> Any:
    """A model of transformers, with masks that hide something and masks that do not. Returns the compiled model."""
    torch.manual_seed(0)
    model = tiny(kind).eval().to(device)
    model.set_attn_implementation(attention)
    fast = compile_model(model)
    with torch.no_grad():
        for hidden in (0, 0, 2, 0, 3):
            ids = torch.randint(3, 64, (2, 5), device=device)
            mask = torch.ones(2, 5, dtype=torch.long, device=device)
            mask[0, :hidden] = 0
            inputs = {"input_ids": ids, "attention_mask": mask}
            if kind == "t5":
                inputs["decoder_input_ids"] = ids[:, :3]
            expected = model(**inputs)
            found = fast(**inputs)
            torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-3, atol=1e-3)
    return fast
