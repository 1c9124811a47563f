"""Packed sequences, nested tensors, tensors without memory, containers that show other things than they hold: served
right, or told."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import piecegraph
from piecegraph.errors import TraceError

MODES = [torch.no_grad, torch.inference_mode]
FRONTENDS = ["auto", "breakable"]


def compile_recorded(function: Callable[..., Any], frontend: str) -> Any:
    return piecegraph.compile(
        function, backend="eager", frontend=frontend, on_fallback="ignore", options={"graph_device": "simulated"}
    )


class Packed(nn.Module):
    """As many steps of a recurrent layer for each row as it has tokens."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(4, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, _ = self.layer(packed)
        padded, told = pad_packed_sequence(found, batch_first=True)
        return found.data, padded, told


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_of_as_many_tokens(kind: type[nn.RNNBase], frontend: str, mode: Any) -> None:
    """Sums, numbers of sequences and of steps are the same; which rows have ended when is not."""
    model = Packed(kind).eval()
    fast = compile_recorded(model, frontend)
    with mode():
        for lengths in ([3, 3, 1], [3, 2, 2], [2, 3, 2], [3, 3, 1], [1, 1, 3]):
            given = torch.randn(3, 5, 4), torch.tensor(lengths)
            for mine, expected in zip(fast(*given), model(*given), strict=True):
                torch.testing.assert_close(mine, expected)
    assert fast.stats()["coverage"] == 1.0


def test_a_packed_sequence_by_the_op_itself() -> None:
    layer = nn.GRU(4, 3)

    def run(data: Tensor, sizes: Tensor) -> Tensor:
        hidden: Tensor = torch.ops.aten.gru.data(
            data, sizes, torch.zeros(1, 3, 3), list(layer.parameters()), True, 1, 0.0, False, False
        )[0]
        return hidden

    fast = compile_recorded(run, "breakable")
    for mode in MODES:
        with mode():
            for sizes in ([3, 2, 2], [3, 3, 1]):
                given = torch.randn(7, 4), torch.tensor(sizes)
                torch.testing.assert_close(fast(*given), run(*given))


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_shape_that_is_written_to_memory_of_the_host(frontend: str) -> None:
    def function(x: Tensor) -> Tensor:
        shape: Tensor = torch.ops.aten._shape_as_tensor(x)
        return x + shape.sum()

    fast = compile_recorded(function, frontend)
    with torch.no_grad():
        for size in (3, 3, 5, 3):
            x = torch.randn(size, 2)
            torch.testing.assert_close(fast(x), function(x))


# --- nested tensors

LEFT = [[False, False, False, True], [False, False, True, True]]
SPREAD = [[True, False, False, False], [False, False, False, True]]
NONE = [[False] * 4, [False] * 4]
several_masks = pytest.mark.parametrize(
    "masks", [[LEFT, LEFT], [NONE, LEFT, NONE], [SPREAD, LEFT, SPREAD]], ids=["left", "none", "both"]
)


def encoder(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no nested tensors are used
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, **options).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frontend", FRONTENDS)
@several_masks
def test_a_mask_of_padding_makes_zeros_of_it(masks: list[Any], frontend: str, mode: Any) -> None:
    """By nested tensors, which it does not use where it is traced, or where anybody looks at its calls."""
    model = encoder()
    fast = compile_recorded(model, frontend)
    with mode():
        for mask in masks:
            given = {"src": torch.randn(2, 4, 8), "src_key_padding_mask": torch.tensor(mask)}
            torch.testing.assert_close(fast(**given), model(**given))
    assert "enable_nested_tensor=False" in str(fast.stats()["losses"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", MODES)
@several_masks
def test_a_mask_of_padding_in_a_trace_makes_zeros_or_is_refused(masks: list[Any], mode: Any) -> None:
    """Torch 2.11 cannot trace what asks whether a mask is one of padding."""
    model = encoder()
    fast = compile_recorded(model, "trace")
    with mode(), contextlib.suppress(TraceError):
        for mask in masks:
            given = {"src": torch.randn(2, 4, 8), "src_key_padding_mask": torch.tensor(mask)}
            torch.testing.assert_close(fast(**given), model(**given))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_mask_that_is_not_checked_makes_zeros_of_padding(frontend: str, mode: Any) -> None:
    model = encoder(mask_check=False)
    fast = compile_recorded(model, frontend)
    with mode():
        for mask in (LEFT, None, NONE):
            given = {"src": torch.randn(2, 4, 8), "src_key_padding_mask": mask and torch.tensor(mask)}
            torch.testing.assert_close(fast(**given), model(**given))
    assert "enable_nested_tensor=False" in str(fast.stats()["losses"])


def test_a_mask_that_is_not_checked_cannot_be_traced() -> None:
    fast = compile_recorded(encoder(mask_check=False), "trace")
    with torch.no_grad(), pytest.raises(TraceError, match="_nested_tensor_from_mask"):
        fast(torch.randn(2, 4, 8), src_key_padding_mask=torch.tensor(LEFT))


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("mask_check", [True, False])
def test_an_encoder_without_nested_tensors_is_served(mask_check: bool, frontend: str) -> None:
    model = encoder(enable_nested_tensor=False, mask_check=mask_check)
    fast = compile_recorded(model, frontend)
    with torch.no_grad():
        for mask in (LEFT, NONE, SPREAD):
            given = {"src": torch.randn(2, 4, 8), "src_key_padding_mask": torch.tensor(mask)}
            torch.testing.assert_close(fast(**given), model(**given))
    assert fast.stats()["coverage"] == 1.0


# --- tensors without memory


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_tangents_that_are_zero(frontend: str) -> None:
    layer = nn.Linear(4, 4)

    def slopes(x: Tensor) -> Tensor:
        found: Tensor = torch.func.vmap(torch.func.jacfwd(lambda row: layer(row).tanh()))(x)
        return found

    fast = compile_recorded(slopes, frontend)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 4)
            torch.testing.assert_close(fast(x), slopes(x))
    assert fast.stats()["coverage"] == 1.0


# --- containers that are not what they show


class Halves(dict[str, Tensor]):
    """Holds what it shows twice as large."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(name) / 2

    def values(self) -> Any:
        return [self[name] for name in self]


class Twice(list[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (tensor * 2 for tensor in super().__iter__())


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_containers_with_methods_of_their_own(frontend: str) -> None:
    def function(given: dict[str, Tensor], more: Twice) -> Halves:
        return Halves(sum=sum(given.values(), given["x"]) + sum(more), first=more[0])

    fast = compile_recorded(function, frontend)
    with torch.no_grad():
        for _ in range(3):
            given = Halves(x=torch.randn(3), y=torch.randn(3)), Twice([torch.randn(3), torch.randn(3)])
            mine, expected = fast(*given), function(*given)
            assert type(mine) is Halves
            for name in ("sum", "first"):
                torch.testing.assert_close(mine[name], expected[name])
