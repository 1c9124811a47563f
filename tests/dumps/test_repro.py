"""A repro runs alone: it makes its inputs, compares the ways to run a piece, and needs nothing of ours."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.dumps.repro import Repro, large_constants, write_repro
from piecegraph.dumps.specs import specs_of
from piecegraph.dumps.standalone import Maker
from piecegraph.llm.kernels.linear import use_skinny_linears
from tests.cases.forked import ForkServer
from tests.cases.modules import Stack, attend_into, two_results

ALONE = """
import runpy, sys
sys.modules["piecegraph"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a file where ``import piecegraph`` fails."""


def dump(model: Any, folder: Path, *inputs: Tensor, **arguments: Any) -> Path:
    """The repro of the first piece."""
    options = {"dump": folder, **arguments.pop("options", {})}
    settings = {"backend": "eager", "frontend": "trace", "on_fallback": "ignore", **arguments}
    fast = piecegraph.compile(model, options=options, **settings)
    with torch.no_grad():
        fast(*inputs)
    (found,) = folder.glob("*/piece_00.py")
    return found


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a repro in this process; returns its exit code and what it prints."""

    def run(path: Path, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


def alone(forked: ForkServer, path: Path, *words: str) -> Any:
    return forked.run("-c", ALONE, str(path), *words, cwd=path.parent)


class Broken(nn.Module):
    """Inductor has a deliberate bug in relu, for tests like this one; one that it does not know is one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def test_a_broken_piece_fails_alone_as_it_did_here(tmp_path: Path, forked: ForkServer) -> None:
    options = {"inductor": {"cpp.inject_relu_bug_TESTING_ONLY": "any"}}
    path = dump(Broken(), tmp_path, torch.ones(8, 12), backend="inductor", options=options)
    smallest = path.with_name("piece_00_smallest.py")
    assert re.search(r"\n        relu: .* = input_linear.relu\(\)", smallest.read_text())
    assert "weight linear.weight" in path.read_text()
    assert "nn.linear(" in path.read_text()
    assert "nn.linear(" not in smallest.read_text()
    assert alone(forked, smallest).returncode == 0, "it runs if it is not compiled"
    done = alone(forked, smallest, "--check")
    assert done.returncode == 1, done.stderr
    assert "\ncompiled  InductorError: AssertionError: unrecognized config cpp.inject_relu_bug" in done.stdout


def test_ways_that_agree_are_told_so(tmp_path: Path, forked: ForkServer) -> None:
    path = dump(nn.Linear(12, 6), tmp_path, torch.ones(8, 12), dynamic_dims={"input": 0})
    done = alone(forked, path, "--check", "--size", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^compiled  the same$", done.stdout, re.MULTILINE)


def test_a_difference_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Callable[..., tuple[int, str]]
) -> None:
    path = dump(nn.Linear(12, 6), tmp_path, torch.ones(8, 12), dynamic_dims={"input": 0})

    def compile_wrongly(piece: Any, **_: Any) -> Any:
        return lambda *inputs: [result + 1 for result in piece(*inputs)]

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    code, told = run_here(path, "--check")
    assert code == 1
    assert re.search(r"compiled  a relative difference of \S+ at 0", told)


def test_memory_that_nobody_has_written_to_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Callable[..., tuple[int, str]]
) -> None:
    """A piece makes room for the op behind it."""
    path = dump(Stack(attend_into, 1), tmp_path, torch.ones(8, 12), splitting_ops=["pgtest::attention_out"])
    assert "torch.empty_like(" in path.read_text()

    def compile_with_other_rubbish(piece: Any, **_: Any) -> Any:
        return lambda *inputs: [each.fill_(7) if i == 3 else each for i, each in enumerate(piece(*inputs))]

    monkeypatch.setattr(torch, "compile", compile_with_other_rubbish)
    code, told = run_here(path, "--check")
    assert code == 0, told
    assert "1 not compared, because nothing is in it yet" in told


def test_the_size_is_an_argument(tmp_path: Path, run_here: Callable[..., tuple[int, str]]) -> None:
    path = dump(nn.Linear(12, 6), tmp_path, torch.ones(8, 12), dynamic_dims={"input": 0})
    assert run_here(path) == (0, "float32[8, 6] on cpu\n")
    assert run_here(path, "--size", "3") == (0, "float32[3, 6] on cpu\n")


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((7, 4), 0.5))

    def forward(self, index: Tensor, mask: Tensor, x: Tensor) -> Tensor:
        return torch.where(mask, self.table[index], x.t()) * 2


def test_inputs_are_made_like_those_that_were_seen(tmp_path: Path, run_here: Callable[..., tuple[int, str]]) -> None:
    index, mask = torch.tensor([2, 6, 3]), torch.tensor([[True]]).expand(3, 4)
    x = torch.linspace(-3, 5, 12).view(4, 3)
    path = dump(Looks(), tmp_path, index, mask, x, dynamic_dims={})
    made = runpy.run_path(str(path))["make_inputs"](Maker("cpu"), ())
    by_dtype = {each.dtype: each for each in made}
    assert sorted(str(each.dtype) for each in made) == ["torch.bool", "torch.float32", "torch.float32", "torch.int64"]
    assert by_dtype[torch.int64].min() >= 2
    assert by_dtype[torch.int64].max() <= 6
    assert by_dtype[torch.bool].all()
    assert {tuple(each.shape) for each in made if each.dtype == torch.float32} == {(7, 4), (4, 3)}
    assert all((each == 0.5).all() for each in made if tuple(each.shape) == (7, 4))
    assert run_here(path)[0] == 0
    assert "# weight table" in path.read_text()


def test_inputs_are_saved_if_that_is_asked_for(tmp_path: Path, run_here: Callable[..., tuple[int, str]]) -> None:
    x = torch.arange(24.0).view(2, 12)
    path = dump(nn.Linear(12, 6), tmp_path, x, dynamic_dims={"input": 0}, options={"dump_inputs": True})
    saved = torch.load(path.with_name("piece_00_inputs.pt"))
    assert any(isinstance(each, Tensor) and torch.equal(each, x) for each in saved)
    assert run_here(path) == (0, "float32[2, 6] on cpu\n")
    assert run_here(path, "--size", "4") == (0, "float32[4, 6] on cpu\n")


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((3, 4), (4, 1)), ((4, 3), (1, 4)), ((3, 4), (0, 1)), ((2, 3), (8, 2)), ((), ()), ((0,), (1,))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_tensors_lie_as_they_lay(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
    made, again = (Maker("cpu").tensor(shape, stride, dtype, 0, 1) for _ in range(2))
    assert (made.shape, made.stride(), made.dtype) == (shape, stride, dtype)
    assert torch.equal(made, again)


def test_constants_come_along(tmp_path: Path) -> None:
    graph, owner = torch.fx.Graph(), nn.Module()
    owner.register_buffer("few", torch.tensor([1.0, float("inf")]))
    owner.register_buffer("many", torch.arange(600.0).view(300, 2))
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.ones(300, 2)
    graph.output((graph.call_function(torch.add, (graph.get_attr("many"), graph.get_attr("few"))), x))
    module = torch.fx.GraphModule(owner, graph)
    specs = specs_of(module)
    assert isinstance(specs, tuple)
    repro = Repro("piece_00", "Piece 0", module, specs)
    (tmp_path / "piece_00.py").write_text(write_repro(repro)[0])
    torch.save(large_constants(module), tmp_path / repro.constants_file)
    piece = runpy.run_path(str(tmp_path / "piece_00.py"))["make_piece"]()
    assert torch.equal(piece(torch.ones(300, 2))[0], owner.many + owner.few)
    assert list(large_constants(module)) == ["many"]


def test_ops_of_ours_have_a_plain_form(tmp_path: Path, forked: ForkServer) -> None:
    """On a GPU, the linears of a language model are an op of piecegraph's."""
    path = dump(nn.Linear(12, 6), tmp_path, torch.ones(8, 12), passes=[use_skinny_linears], dynamic_dims={"input": 0})
    assert "torch.ops.piecegraph.linear.default(" in path.read_text()
    done = alone(forked, path)
    assert (done.returncode, done.stdout) == (0, "float32[8, 6] on cpu\n"), done.stderr


def test_ops_of_others_are_imported(tmp_path: Path) -> None:
    path = dump(lambda x: two_results(x)[0] + 1, tmp_path, torch.ones(8, 12), splitting_ops=[])
    assert "\nimport tests.cases.modules  # registers pgtest::two_results\n" in path.read_text()
    assert "It needs torch, and whatever registers pgtest::two_results." in path.read_text()


def test_a_graph_in_a_graph_is_code_without_a_repro() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    module = torch.export.export(Inner(), (torch.ones(2),)).graph_module
    text, _ = write_repro(Repro("piece_00", "Piece 0", module, None, why_not="it holds a GraphModule"))
    assert "It cannot be run alone: it holds a GraphModule" in text
    assert "make_inputs" not in text
    assert isinstance(specs_of(module), tuple)
