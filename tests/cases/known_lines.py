"""A model of which it is known what each line runs: every op has a line of its own, found again by its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.base.origin import GraphRecord, LaunchCall
from tests.cases.modules import unsafe

WIDTH = 8
SIZE = 4
PROVENANCE = {"graph_device": "simulated", "provenance": True}
_VIEWS = ("aten::t", "aten::view", "aten::transpose", "aten::unbind", "aten::detach")


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.proj(x)
        gate = torch.sigmoid(gate)
        gate.mul_(0.5)
        return gate * x


def squash(x: Tensor) -> Tensor:
    return torch.tanh(x)


class Layer(nn.Module):
    """Holds a module, calls a function, and has an op in it that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = squash(self.gate(x))
        x = unsafe(x)
        return self.out(x)


class Layers(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Nest(nn.Module):
    """Modules of one class inside each other, all running the same line."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Nest(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.inner(x))


class Remembers(nn.Module):
    """Writes to a buffer of its own, and its result depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))
        self.total: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(torch.tanh(x).sum(0))
        return x + self.total


@dataclass(frozen=True)
class Place:
    """What is known of a call."""

    op: str
    module: str
    line: str
    """Its text."""


def places_in_layer(path: str) -> list[Place]:
    """The truth for one layer: its ops in graphs, views left out."""
    return [
        Place("aten::mm", f"{path}.gate.proj", "gate = self.proj(x)"),
        Place("aten::sigmoid", f"{path}.gate", "gate = torch.sigmoid(gate)"),
        Place("aten::mul_", f"{path}.gate", "gate.mul_(0.5)"),
        Place("aten::mul", f"{path}.gate", "return gate * x"),
        Place("aten::tanh", path, "return torch.tanh(x)"),
        Place("aten::addmm", f"{path}.out", "return self.out(x)"),
    ]


def place_of(call: LaunchCall) -> Place:
    """Where a call is said to come from; checks that the line's number is that of its text."""
    (origin,) = call.origins
    assert origin.line is not None
    numbers = [
        i
        for i, text in enumerate(Path(origin.line.file).read_text().splitlines(), 1)
        if text.strip() == origin.line.text
    ]
    assert origin.line.line in numbers
    return Place(call.op, origin.module, origin.line.text)


def places_in(records: list[GraphRecord]) -> list[Place]:
    """Where the nodes of some graphs come from, in order, views left out."""
    calls = [record.calls[node.call] for record in records for node in record.nodes if node.call is not None]
    return [place_of(call) for call in dict.fromkeys(calls) if call.op not in _VIEWS]


def compile_known(model: Any, **arguments: Any) -> Any:
    """Compiled with simulated graphs that know what is in them."""
    options = {**PROVENANCE, **arguments.pop("options", {})}
    defaults = {"backend": "eager", "capture_sizes": [SIZE], "dynamic_dims": {"x": 0}, "on_fallback": "raise"}
    if arguments.get("frontend") == "breakable":
        defaults["splitting_ops"] = ["pgtest::unsafe"]
    return piecegraph.compile(model, **{**defaults, **arguments}, options=options)


def rows(num_rows: int = SIZE, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def eager_calls(records: list[Any]) -> Iterator[LaunchCall]:
    """The calls of the steps between graphs."""
    return (step.call for tape in records for step in tape.steps if getattr(step, "call", None) is not None)
