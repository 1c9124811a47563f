"""What a failure leaves: the dump, the failing piece marked, the op alone in a file, and where all of it is."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn

import piecegraph
from piecegraph.dumps.smallest import Part, smallest_failing
from piecegraph.errors import FallbackError, LowerError, RecordError
from piecegraph.graph.fx_nodes import op_name
from piecegraph.tape.simulated import SimulatedGraphs
from tests.cases.modules import attention


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 12)

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index * 2).cos()
        x = attention(*[x.view(-1, 2, 6)] * 3).reshape(-1, 12)
        a, b = (x.sin() * 3).sigmoid().chunk(2, -1)
        return torch.tanh(a) - b


def compile_layers(folder: Path, **arguments: Any) -> Any:
    options = {"dump": folder, **arguments.pop("options", {})}
    settings = {"backend": "eager", "capture_sizes": [8], "on_fallback": "ignore", "frontend": "trace", **arguments}
    return piecegraph.compile(Layers(), splitting_ops=["pgtest::attention"], options=options, **settings)


def call(fast: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = fast(torch.arange(8) % 5)
    return result


def code_of(path: Path) -> str:
    lines = path.read_text().partition("class Piece")[2].partition("def make_piece")[0].splitlines()
    return "\n".join(line for line in lines if "# File:" not in line)


def without_sigmoid(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A compiler that knows all but one op."""
    for node in module.graph.nodes:
        if op_name(node) == "aten::sigmoid" or node.target == "sigmoid":
            raise KeyError("sigmoid")
    return module.forward


def test_a_compile_that_fails_is_cut_down_to_the_op(tmp_path: Path) -> None:
    fast = compile_layers(tmp_path, backend=without_sigmoid)
    call(fast)
    folder = tmp_path / "Layers"
    smallest = folder / "piece_02_smallest.py"
    assert re.search(r"def forward\(.*\n +sigmoid: .* = input_mul.sigmoid\(\);.*\n +return ", code_of(smallest))
    index = (folder / "index.md").read_text()
    assert "**FAILED piece 2**: KeyError (of its ops, aten::sigmoid will do): 'sigmoid'; see [piece_02_s" in index
    assert re.search(r"^\| 2 \| \*\*FAILED\*\* piece \| \d+ \|", index, re.MULTILINE)
    assert "| 0 | piece |" in index
    assert f"hint: python {smallest} --check" in fast.explain()


def test_an_error_ends_with_the_files(tmp_path: Path) -> None:
    fast = compile_layers(tmp_path, backend=without_sigmoid, on_fallback="raise")
    with pytest.raises(FallbackError, match="PG302") as raised:
        call(fast)
    folder = tmp_path / "Layers"
    names = ["index.md", "piece_02_smallest.py", "piece_02.py", "split.py", "traced.py"]
    assert raised.value.__notes__ == ["\n".join(["what was dumped of it:", *(f"  {folder / name}" for name in names)])]
    index = (folder / "index.md").read_text()
    assert "the plan was not made to its end" in index
    assert "**FAILED**: PG302 piece 2:" in index
    assert all((folder / name).exists() for name in names)


def test_a_graph_that_cannot_be_cut_leaves_the_trace(tmp_path: Path) -> None:
    options = {"dump": tmp_path}
    fast = piecegraph.compile(lambda x: x.nonzero() + 1, cudagraph_mode="full", frontend="trace", options=options)
    with pytest.raises(LowerError, match="PG301") as raised:
        fast(torch.ones(3))
    (folder,) = tmp_path.iterdir()
    assert "nonzero" in (folder / "traced.py").read_text()
    assert "PG301" in (folder / "index.md").read_text()
    assert str(folder / "traced.py") in raised.value.__notes__[0]


@pytest.mark.parametrize("device", ["auto", "simulated"])
def test_a_run_that_fails_is_cut_down_to_the_op(tmp_path: Path, device: str) -> None:
    fast = compile_layers(tmp_path, options={"graph_device": device})
    with torch.no_grad():
        fast(torch.zeros(8, dtype=torch.int64))
        with pytest.raises(IndexError) as raised:
            fast(torch.full((8,), 9))
    folder = tmp_path / "Layers"
    smallest = folder / "piece_00_smallest.py"
    assert str(smallest) in raised.value.__notes__[0]
    assert "embedding(" in code_of(smallest)
    assert "cos" not in code_of(smallest)
    for name in ("piece_00.py", "piece_00_smallest.py"):
        scope = runpy.run_path(str(folder / name))
        with pytest.raises(IndexError):
            scope["make_piece"]()(*scope["make_inputs"](scope["Maker"]("cpu"), (8,)))
    assert "IndexError at aten::embedding (test_failures.py:" in (folder / "index.md").read_text()


def test_values_are_saved_where_values_like_them_do_not_fail(tmp_path: Path) -> None:
    checked = torch.library.custom_op("pgtest::not_seven", _not_seven, mutates_args=())
    checked.register_fake(lambda x: torch.empty_like(x))
    options = {"dump": tmp_path}
    fast = piecegraph.compile(lambda x: checked(x * 1) + 1, backend="eager", frontend="trace", options=options)
    with torch.no_grad():
        fast(torch.arange(6.0))
        with pytest.raises(ValueError, match="seven"):
            fast(torch.arange(2.0, 8.0))
    (folder,) = tmp_path.iterdir()
    (saved,) = [each for each in torch.load(folder / "piece_00_smallest_inputs.pt") if isinstance(each, Tensor)]
    assert saved.tolist() == [2, 3, 4, 5, 6, 7]


def _not_seven(x: Tensor) -> Tensor:
    if (x == 7).any():
        raise ValueError("seven")
    return x.clone()


class ForbidsSine(SimulatedGraphs):
    """Fails like a GPU does."""

    kind: type[Exception] = RuntimeError

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if module is not None and any(node.target == "sin" for node in module.graph.nodes):
            raise self.kind("operation not permitted when stream is capturing")
        return super().call(function, args, kwargs)


def test_a_capture_that_fails_is_cut_down_to_the_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.engine.mode.SimulatedGraphs", ForbidsSine)
    fast = compile_layers(tmp_path, options={"graph_device": "simulated"})
    for _ in range(2):
        torch.testing.assert_close(call(fast), call(fast._original))
    assert fast.stats()["events"] == {"PG401": 1}
    folder = tmp_path / "Layers"
    index = (folder / "index.md").read_text()
    assert "it cannot be captured (of its ops, aten::sin will do): RuntimeError: operation not permitted" in index
    assert ".sin()" in code_of(folder / "piece_02_smallest.py")
    assert "sigmoid" not in code_of(folder / "piece_02_smallest.py")


class CannotGoOn(ForbidsSine):
    kind = ValueError


def test_a_size_that_cannot_be_recorded_says_where_the_dump_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecegraph.engine.mode.SimulatedGraphs", CannotGoOn)
    fast = compile_layers(tmp_path, options={"graph_device": "simulated"})
    with torch.no_grad(), pytest.raises(RecordError, match="PG403") as raised:
        fast.capture(torch.arange(8) % 5)
    assert str(tmp_path / "Layers" / "index.md") in raised.value.__notes__[0]
    index = (tmp_path / "Layers" / "index.md").read_text()
    assert "**FAILED**: PG403 size 8 could not be recorded" in index
    assert "| 2 | **FAILED** piece |" in index


# --- the smallest part


def part_names(part: Part | None) -> list[str]:
    assert part is not None
    return [node.name for node in part.module.graph.nodes if node.op.startswith("call_")]


def chain() -> torch.fx.GraphModule:
    """Sixteen ops, one behind the other, with a result of two in the middle."""
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    value.meta["example_value"] = example = torch.ones(4)
    for index in range(16):
        value = graph.create_node("call_function", torch.neg, (value,), name=f"neg_{index}")
        value.meta["example_value"] = example
    graph.output((value,))
    return torch.fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("wrong", [["neg_0"], ["neg_15"], ["neg_7"], ["neg_4", "neg_9"]])
def test_the_smallest_part(wrong: list[str]) -> None:
    trials: list[Part] = []

    def fails(part: Part) -> bool:
        trials.append(part)
        return set(wrong) <= {node.name for node in part.module.graph.nodes}

    names = part_names(smallest_failing(chain(), fails))
    assert (names[0], names[-1]) == (wrong[0], wrong[-1])
    assert len(trials) <= 9


def test_no_part_is_found_if_none_fails() -> None:
    assert smallest_failing(chain(), lambda part: False) is None
