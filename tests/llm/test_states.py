"""The kernels of layers that keep a state: plain torch, and Triton in its interpreter, against the definition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from piecegraph.llm.cache.states import StateKernels, choose_states
from piecegraph.llm.kernels.state_plain import PlainStates
from piecegraph.llm.kernels.state_triton import TritonStates
from piecegraph.llm.specs import ConvLayer, DeltaLayer, StatefulLayer
from tests.cases.interpreter import needs_interpreter, print_verdicts, verdicts_of
from tests.cases.states import PROMPTS_AND_DECODE, ConvCase, DeltaCase

CPU = torch.device("cpu")
LAYERS: dict[str, ConvCase | DeltaCase] = {
    "convolution": ConvCase(40, 4, "silu", False, torch.float32, CPU),
    "convolution with a bias": ConvCase(130, 3, "", True, torch.float32, CPU),
    "a wide convolution": ConvCase(8, 9, "swish", True, torch.float32, CPU),
    "delta rule": DeltaCase(2, 16, 16, True, torch.float32, CPU),
    "narrow keys, wide values": DeltaCase(2, 8, 40, False, torch.float32, CPU),
    "wide keys": DeltaCase(1, 72, 24, True, torch.float32, CPU),
    "keys too wide for long chunks": DeltaCase(1, 136, 16, True, torch.float32, CPU),
    "equal keys": DeltaCase(1, 16, 16, True, torch.float32, CPU, keys_are_equal=True),
}


def _check(make_kernels: Callable[[], StateKernels], name: str) -> None:
    LAYERS[name].check(make_kernels(), PROMPTS_AND_DECODE, tolerance=2e-4)


@pytest.mark.parametrize("name", LAYERS)
def test_plain_torch(name: str) -> None:
    with torch.no_grad():
        _check(PlainStates, name)


@needs_interpreter
def test_triton_in_its_interpreter() -> None:
    assert verdicts_of("tests.llm.test_states") == dict.fromkeys(LAYERS, "right")


def test_which_kernels_are_chosen_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = ConvLayer(index=0, channels=8, width=4, activation="silu", has_bias=False, dtype=torch.float32)
    half = torch.bfloat16
    delta = DeltaLayer(
        index=1,
        num_heads=2,
        key_width=16,
        value_width=16,
        normalises=True,
        dtype=half,
        decay_dtype=torch.float32,
        beta_dtype=half,
    )
    opaque = StatefulLayer(index=2, path="mixer", width=4, dtype=torch.float32)
    assert choose_states([opaque], torch.float32, CPU)[1] == ()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels, (decision,) = choose_states([conv, delta], torch.float32, CPU)
    assert (kernels.name, decision.choice) == ("plain torch", "plain torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels, (decision,) = choose_states([conv, delta], torch.float32, CPU)
    assert (kernels.name, decision.choice) == ("triton", "triton")
    wide = replace(delta, key_width=512)
    gelu = ConvLayer(index=0, channels=8, width=4, activation="gelu", has_bias=False, dtype=torch.float32)
    for layer, reason in ((wide, "wider than 256"), (gelu, "activation gelu")):
        kernels, (decision,) = choose_states([layer], torch.float32, CPU)
        assert kernels.name == "plain torch"
        assert reason in decision.reason


if __name__ == "__main__":
    print_verdicts({name: functools.partial(_check, TritonStates, name) for name in LAYERS})
