"""Objects that carry tensors between parts of a model, as arguments and as results of compiled parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import DynamicCache

import piecegraph
from piecegraph.errors import TraceError
from tests.cases.forked import ForkServer

ROOT = Path(__file__).parents[2]
FRONTENDS = ["trace", "breakable"]


class Plain:
    """As pipelines of serving engines have them: nobody knows of it."""

    def __init__(self, hidden: Tensor, residual: Tensor) -> None:
        self.tensors = {"hidden": hidden, "residual": residual}
        self.name = "stage"

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def items(self) -> Any:
        return self.tensors.items()


class Registered(Plain):
    """Known to torch's pytree."""


@dataclasses.dataclass(init=False)
class Data(Plain):
    """A dataclass with a constructor of its own."""

    tensors: dict[str, Tensor]

    def __init__(self, hidden: Tensor, residual: Tensor) -> None:
        self.tensors = {"hidden": hidden, "residual": residual}


@dataclasses.dataclass(slots=True)
class Slots:
    hidden: Tensor
    residual: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)


def mapping(hidden: Tensor, residual: Tensor) -> dict[str, Tensor]:
    return {"hidden": hidden, "residual": residual}


MAKERS: list[Callable[..., Any]] = [Plain, Registered, Data, Slots, mapping]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    def flatten(value: Registered) -> tuple[list[Any], Any]:
        return list(value.tensors.values()), None

    pytree.register_pytree_node(Registered, flatten, lambda tensors, _: Registered(*tensors))
    yield
    pytree._deregister_pytree_node(Registered)


class Stage(nn.Module):
    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(8, 8), make

    def forward(self, given: Any) -> Any:
        residual = given["residual"] + given["hidden"]
        return self.make(torch.relu(self.linear(residual)), residual)


def fast_copy(function: Any, frontend: Any) -> Any:
    return piecegraph.compile(function, backend="eager", frontend=frontend, options={"graph_device": "simulated"})


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("make", MAKERS)
@torch.no_grad()
def test_parts_take_and_return_them(make: Callable[..., Any], frontend: str) -> None:
    torch.manual_seed(0)
    first, second = Stage(make), Stage(make)
    fast_first, fast_second = fast_copy(first, frontend), fast_copy(second, frontend)
    for num_rows in (4, 3, 4, 6, 3):
        given = make(torch.randn(num_rows, 8), torch.randn(num_rows, 8))
        expected, found = second(first(given)), fast_second(fast_first(given))
        assert type(found) is type(expected)
        for name in ("hidden", "residual"):
            torch.testing.assert_close(found[name], expected[name])
    assert fast_first.stats()["coverage"] == fast_second.stats()["coverage"] == 1.0


def test_other_values_in_an_object_are_another_plan() -> None:
    def scaled(given: Any) -> Tensor:
        return given["hidden"] * (2 if given.name == "double" else 1)

    fast, given = fast_copy(scaled, "trace"), Plain(torch.ones(3), torch.ones(3))
    assert fast(given).tolist() == [1.0] * 3
    given.name = "double"
    assert fast(given).tolist() == [2.0] * 3
    given.more = 1  # type: ignore[attr-defined]
    assert fast(given).tolist() == [2.0] * 3


def test_gradients_in_an_object_are_not_lost() -> None:
    hidden = torch.ones(3, requires_grad=True)
    fast = piecegraph.compile(lambda given: given["hidden"] * 2, backend="eager", on_fallback="ignore")
    fast(Plain(hidden, torch.ones(3))).sum().backward()
    assert hidden.grad is not None


def set_item(given: Any) -> Tensor:
    if isinstance(given, Slots):
        given.hidden = given.hidden + 1
    else:
        given.tensors["hidden"] = given.tensors["hidden"] + 1
    return given["residual"] * 2


def set_attribute(given: Any) -> Tensor:
    given.count = 1
    return given["residual"] * 2


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    ("change", "make"),
    [*((set_item, make) for make in MAKERS[:-1]), *((set_attribute, make) for make in MAKERS[:-2])],
)
@torch.no_grad()
def test_changes_of_an_object_are_refused(change: Any, make: Callable[..., Any], frontend: str) -> None:
    given = make(torch.ones(3), torch.ones(3))
    with pytest.raises(TraceError, match="PG202 the function changes Python state: given"):
        fast_copy(change, frontend)(given)
    assert given["hidden"].tolist() == [1.0] * 3
    assert not hasattr(given, "count")


@pytest.mark.parametrize("held", [object(), nn.ModuleList().state_dict, Plain(torch.ones(1), torch.ones(1))])
def test_objects_that_hold_more_than_tensors_are_refused(held: Any) -> None:
    given = Plain(torch.ones(3), torch.ones(3))
    given.held = held  # type: ignore[attr-defined]
    with pytest.raises(TraceError, match="PG203 given is a Plain"):
        fast_copy(lambda given: given["hidden"] + 1, "trace")(given)


def test_a_cache_of_transformers_is_refused_with_the_ways_to_generate() -> None:
    with pytest.raises(TraceError, match=r"PG203 cache is a DynamicCache.*piecegraph\.LLM\(path\).*use_cache=False"):
        fast_copy(lambda cache: cache.get_seq_length(), "trace")(DynamicCache())


LAUNCH = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

how = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, **how)
elastic_launch(config, lambda: runpy.run_path("examples/pipeline.py", run_name="__main__") and None)()
"""


def test_two_stages_in_two_processes_are_the_whole_model(forked: ForkServer) -> None:
    done = forked.run("-c", LAUNCH, cwd=ROOT, seconds=120)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line.partition(":") for line in done.stdout.splitlines()]
    assert [line[0] for line in told] == [f"{number} tokens through 2 stages" for number in (5, 8, 3)]
    assert all(float(line[2].removeprefix(" differs by ")) < 1e-5 for line in told)
