"""A compiled function that nobody holds any more gives back at once what it held.

Graphs, their memory and weights are on a GPU, of which Python's garbage collector knows nothing: what lies in a circle
stays there until enough objects of Python have been made, which replays make none of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piecegraph
from piecegraph.errors import PiecegraphError
from tests.cases.held import Held, without_collector

ROWS = (4, 8, 6, 4)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.softmax(torch.relu(self.first(x)), -1))


class Reading(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if y.sum().item() > 0 else y


class Writing(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x.mul_(2)
        return super().forward(x) + self.calls


def call(fast: Any) -> None:
    for rows in ROWS:
        fast(torch.ones(rows, 8))  # always the same way, where the host reads


def call_inside_a_trace(fast: Any) -> None:
    with piecegraph.trace() as taken:
        call(fast)
    taken.table()


def intercept(fast: Any) -> None:
    with piecegraph.intercept("aten::relu", before=lambda *args: None):
        call(fast)
    call(fast)


def switch_a_kernel_off(fast: Any) -> None:
    call(fast)
    with fast.kernels.select(op="aten::relu").disable():
        call(fast)
    call(fast)


def explain(fast: Any) -> None:
    call(fast)
    fast.explain()
    fast.stats()


def fail(fast: Any) -> None:
    call(fast)
    with pytest.raises((PiecegraphError, RuntimeError)):
        fast(torch.ones(4, 5))


USES: tuple[Callable[[Any], None], ...] = (call, call_inside_a_trace, intercept, switch_a_kernel_off, explain, fail)
WAYS: dict[str, tuple[type[Plain], dict[str, Any]]] = {
    "traced": (Plain, {}),
    "cut": (Plain, {"splitting_ops": ["aten::softmax.int"]}),
    "it writes": (Writing, {}),
    "recorded as it runs": (Plain, {"frontend": "breakable"}),
    "the host reads": (Reading, {"frontend": "breakable"}),
}


@pytest.mark.parametrize("provenance", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left(way: str, provenance: bool) -> None:
    kind, arguments = WAYS[way]
    model = kind().eval()
    options = {"graph_device": "simulated", "provenance": provenance}
    fast = piecegraph.compile(
        model, backend="eager", dynamic_dims={"x": 0}, on_fallback="ignore", options=options, **arguments
    )
    with torch.inference_mode():
        call(fast)
        with without_collector():
            for use in USES:
                if provenance or use is not switch_a_kernel_off:
                    use(fast)
            tapes = fast._engine.recorded.tapes()
            assert tapes
            held = Held({"the model": model, "a weight": model.first.weight, "the engine": fast._engine}, tape=tapes)
            del fast, model, tapes
            assert held.left() == set()


@pytest.mark.parametrize("is_kept", [False, True], ids=["the old one goes", "the old one stays"])
@pytest.mark.parametrize("way", ["traced", "cut", "it writes"])
def test_weights_may_be_swapped(way: str, is_kept: bool) -> None:
    """``torch.utils.swap_tensors`` refuses a tensor that anybody holds weakly."""
    kind, arguments = WAYS[way]
    model = kind().eval()
    options = {"graph_device": "simulated"}
    fast = piecegraph.compile(model, backend="eager", on_fallback="ignore", options=options, **arguments)
    x = torch.randn(4, 8)
    kept = []
    with torch.no_grad():
        for weight in (model.first.weight, model.first.bias, model.second.weight):
            fast(x.clone())
            other = nn.Parameter(torch.randn_like(weight))
            with without_collector():  # Dynamo's own leavings hold tensors weakly, too
                torch.utils.swap_tensors(weight, other)
            kept += [other] * is_kept
            del other
            calls = model.calls.clone()
            found = fast(x.clone())
            model.calls.copy_(calls)
            torch.testing.assert_close(found, model(x.clone()))


def test_conversion_by_swapping(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Plain().eval()
    fast = piecegraph.compile(model, backend="eager", on_fallback="ignore", options={"graph_device": "simulated"})
    with torch.no_grad(), without_collector():
        fast(torch.randn(4, 8))
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        model.to(torch.float64)
        x = torch.randn(4, 8, dtype=torch.float64)
        torch.testing.assert_close(fast(x), model(x))
