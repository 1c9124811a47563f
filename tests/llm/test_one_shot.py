"""Which sums over ranks are made by one kernel: decided alike on all ranks, with stand-ins for GPUs and for torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

import piecegraph
from piecegraph.base import torch_compat
from piecegraph.base.events import EventLog
from piecegraph.errors import ConfigError
from piecegraph.llm.ranks import collectives, one_shot
from piecegraph.llm.ranks.one_shot import OneShot, choose_all_reduce

GPU = torch.device("cuda", 0)
LABEL = "ranks of a test"


@dataclass
class FakeRanks:
    """The first of two ranks; what the other has is what this one has, unless it is told otherwise."""

    size: int = 2
    rank: int = 0
    label: str = LABEL
    data: Any = field(default_factory=lambda: SimpleNamespace(group_name="data"))
    of_other: Callable[[Any], Any] = lambda value: (value[0], 1) if isinstance(value, tuple) else value

    def gather(self, value: Any) -> list[Any]:
        return [value, self.of_other(value)]


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two ranks with the same numbers, GPUs that are linked, and which way each sum went."""
    ways: list[str] = []

    def nccl(tensor: torch.Tensor, group: Any) -> None:
        ways.append("nccl")
        tensor.mul_(2)

    def kernel(staged: torch.Tensor, group: str, out: torch.Tensor) -> None:
        assert out.is_contiguous()
        assert out.data_ptr() % 16 == 0
        ways.append("one-shot")
        out.copy_(staged * 2)

    monkeypatch.setattr(distributed, "all_reduce", nccl)
    monkeypatch.setattr(torch_compat, "one_shot_all_reduce", kernel)
    monkeypatch.setattr(torch_compat, "symmetric_bytes", lambda size, *_: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(torch_compat, "nvlinks", lambda: [[0, 18], [18, 0]])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(one_shot, "_kept", {})
    collectives.name_group(LABEL, "a group")
    collectives.use_one_shot(LABEL, None)
    return ways


def choose(ranks: Any, most_bytes: int = 65536, events: EventLog | None = None) -> str:
    (decision,) = choose_all_reduce(ranks, GPU, most_bytes, events or EventLog("ignore"))
    return str(decision)


def test_small_sums_go_one_way_and_others_the_other(sent: list[str]) -> None:
    assert choose(FakeRanks()).startswith("sums over ranks: one-shot up to 65,536 bytes, above that NCCL")
    sent.clear()
    for number, dtype in ((8, torch.float32), (32768, torch.bfloat16), (16385, torch.float32), (8, torch.float16)):
        tensor = torch.ones(number, dtype=dtype)
        torch.ops.piecegraph_ranks.all_reduce(tensor, LABEL)
        assert tensor.tolist() == [2.0] * number
    assert sent == ["one-shot", "one-shot", "nccl", "nccl"]


@pytest.mark.parametrize("tensor", [torch.ones(9)[1:], torch.ones(4, 4).t()[:, :3], torch.ones(4, 6)[:, :4]])
def test_a_tensor_that_lies_otherwise_goes_the_same_way(tensor: torch.Tensor, sent: list[str]) -> None:
    sums = OneShot(torch.zeros(64, dtype=torch.uint8), "data")
    assert sums.takes(tensor) == (tensor.numel() % 4 == 0)
    if sums.takes(tensor):
        sums.all_reduce(tensor)
        assert torch.equal(tensor, torch.full(tensor.shape, 2.0))


@pytest.mark.parametrize(
    ("ranks", "most_bytes", "why"),
    [
        (FakeRanks(), 0, "options['one_shot_bytes'] is 0"),
        (FakeRanks(size=1), 64, "it is for 2 to 8 ranks"),
        (FakeRanks(size=16), 64, "it is for 2 to 8 ranks"),
        (FakeRanks(of_other=lambda value: ("elsewhere", 1) if value else value), 64, "ranks are on several machines"),
        (FakeRanks(of_other=lambda value: value), 64, "ranks do not see the GPUs of the others"),
        (FakeRanks(of_other=lambda value: value or "the other cannot"), 64, "the other cannot"),
    ],
)
def test_reasons_against_it_are_told_on_all_ranks(ranks: FakeRanks, most_bytes: int, why: str) -> None:
    assert choose(ranks, most_bytes) == f"sums over ranks: NCCL ({why})"
    assert LABEL not in collectives._one_shots


def test_gpus_that_are_too_old_or_not_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compat, "nvlinks", lambda: [[0, 0], [0, 0]])
    assert choose(FakeRanks()) == "sums over ranks: NCCL (there is no NVLink between GPU 0 and 1)"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose(FakeRanks()) == "sums over ranks: NCCL (the kernel needs compute capability 8.0)"


@pytest.mark.parametrize("name", ["nvlinks", "symmetric_bytes"])
def test_what_torch_cannot_do_is_a_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("not permitted\nat line 1")

    monkeypatch.setattr(torch_compat, name, fails)
    assert choose(FakeRanks()) == "sums over ranks: NCCL (torch cannot: not permitted)"


def test_a_kernel_that_is_wrong_is_not_used_and_counted(monkeypatch: pytest.MonkeyPatch, sent: list[str]) -> None:
    choose(FakeRanks())
    num_compared = len(sent)
    sent.clear()
    monkeypatch.setattr(torch_compat, "one_shot_all_reduce", lambda staged, group, out: out.copy_(staged * 3))
    events = EventLog("ignore")
    assert choose(FakeRanks(), events=events) == "sums over ranks: NCCL (of 8 numbers in bfloat16 it is not NCCL's)"
    assert events.counts == {"PG685": 1}
    assert LABEL not in collectives._one_shots
    assert len(sent) == num_compared // 2, "the other ranks go on, so this one does"


def test_memory_is_kept_for_the_graphs_of_earlier_models() -> None:
    choose(FakeRanks())
    first = collectives._one_shots[LABEL]
    choose(FakeRanks())
    assert collectives._one_shots[LABEL] is first


def test_a_cpu_has_one_way() -> None:
    ranks: Any = FakeRanks()
    assert choose_all_reduce(ranks, torch.device("cpu"), 64, EventLog("ignore")) == ()


@pytest.mark.parametrize("wrong", [-16, 100, "much", 1.5])
def test_a_size_that_is_none(wrong: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"PG101 options\['one_shot_bytes'\] is"):
        piecegraph.LLM(tmp_path, device="cpu", options={"one_shot_bytes": wrong})


def test_torch_has_what_is_called() -> None:
    """Schemas are the same in builds without CUDA; what is behind them is not there."""
    schema = torch.ops.symm_mem.one_shot_all_reduce_out.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name", "out"]
    with pytest.raises(RuntimeError):
        torch_compat.distributed.nvlinks()
    with pytest.raises(RuntimeError):
        torch_compat.distributed.symmetric_bytes(64, torch.device("cpu"), SimpleNamespace(group_name="data"))
