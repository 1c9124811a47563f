"""Pieces that other processes compile: the same pieces, and nothing is lost by what goes wrong there."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from piecegraph.base import torch_compat
from piecegraph.base.events import EventLog
from piecegraph.base.progress import Progress
from piecegraph.graph import compile_aside
from piecegraph.graph.compile import Lowering
from piecegraph.graph.compile_aside import PieceCompilers
from piecegraph.graph.lower import lower
from piecegraph.graph.piece_worker import compile_job, make_job
from tests.cases.modules import unsafe
from tests.graph.test_split import cut
from tests.graph.test_trace import trace_it

INDUCTOR = Lowering("inductor", (), {})
CPU = torch.device("cpu")
X = torch.arange(12.0).view(4, 3) / 7
WEIGHTS = [torch.linspace(-1, 1, 3 * (n + 3)).view(3, n + 3) for n in range(3)]


@pytest.fixture(autouse=True)
def folders(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is compiled anew, and nothing needs a C++ compiler."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch_compat, "num_compilers", lambda: 2)


@pytest.fixture
def aside() -> Iterator[PieceCompilers]:
    made = PieceCompilers()
    yield made
    made.close()


@pytest.fixture(scope="module")
def running() -> Iterator[PieceCompilers]:
    """Processes that several tests use: to import takes them seconds."""
    made = PieceCompilers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_compat, "num_compilers", lambda: 2)
        started(made)
    yield made
    made.close()


def started(aside: PieceCompilers) -> compile_aside._Processes:
    """Wait until the processes listen."""
    aside.start(CPU)
    assert aside._processes is not None
    assert aside._processes._are_ready.wait(120)
    return aside._processes


def three_pieces(x: Tensor) -> Tensor:
    for weight in WEIGHTS:
        x = unsafe(torch.mm(x[:, :3], weight))
    return x


def lowered(function: Any, aside: PieceCompilers) -> tuple[Tensor, EventLog]:
    """What a function returns whose pieces are compiled, and what was told of it."""
    events = EventLog("ignore")
    traced, segments = cut(function, X, dynamic_dims={"x": 0})
    program, num_compiles = lower(traced, segments, INDUCTOR, events, Progress(False), aside=aside)
    assert num_compiles == 3
    sizes = traced.signature.match(traced.signature.names, [X], None, (X,), {}).sizes
    [result] = program.at(sizes).run((X,))
    return result, events


def test_what_others_compiled_computes_the_same(running: PieceCompilers, monkeypatch: pytest.MonkeyPatch) -> None:
    num_before = running.num_compiled
    compile_here, sent = torch_compat.inductor_compile, []

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1)  # others begin with the rest
        sent.append(args)
        return compile_here(*args, **kwargs)

    monkeypatch.setattr(torch_compat, "inductor_compile", slowly)
    result, events = lowered(three_pieces, running)
    torch.testing.assert_close(result, three_pieces(X))
    num_compiled = running.num_compiled - num_before
    assert num_compiled + len(sent) == 3
    assert num_compiled >= 1
    assert not events.counts


def test_what_they_cannot_compile_is_compiled_here_and_told(running: PieceCompilers) -> None:
    num_before = running.num_compiled
    library = torch.library.Library("pgaside", "FRAGMENT")
    library.define("here(Tensor x) -> Tensor")
    library.impl("here", lambda x: x + 1, "CompositeExplicitAutograd")
    library._register_fake("here", lambda x: torch.empty_like(x))

    def function(x: Tensor) -> Tensor:
        for weight in WEIGHTS:
            x = unsafe(torch.ops.pgaside.here(torch.mm(x[:, :3], weight)))
        return x

    result, _ = lowered(function, running)
    torch.testing.assert_close(result, function(X))
    assert running.num_compiled == num_before
    assert all("pgaside::here" in reason for reason in running.refusals)


def test_processes_that_die_are_no_loss(aside: PieceCompilers) -> None:
    processes = started(aside)
    os.killpg(processes._process.pid, signal.SIGKILL)
    result, events = lowered(three_pieces, aside)
    torch.testing.assert_close(result, three_pieces(X))
    assert not events.counts


def test_closing_while_they_import_leaves_no_process(aside: PieceCompilers) -> None:
    aside.start(CPU)
    assert aside._processes is not None
    group = aside._processes._process.pid
    aside.end()
    aside.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_forgotten_ones_are_closed() -> None:
    aside = PieceCompilers()
    group = started(aside)._process.pid
    del aside
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def test_ops_are_found_by_the_modules_that_register_them() -> None:
    ops = [torch.ops.aten.mm.default, torch.ops.pgtest.attention, torch.relu]
    assert torch_compat.modules_of_ops(ops) == ["tests.cases.modules"]
    library = torch.library.Library("pgfile", "FRAGMENT")
    library.define("here(Tensor x) -> Tensor")
    torch.library.register_fake("pgfile::here", torch.empty_like, lib=library)
    assert torch_compat.modules_of_ops([torch.ops.pgfile.here.default]) == [__name__]


def test_none_are_started_where_cores_are_few(monkeypatch: pytest.MonkeyPatch, aside: PieceCompilers) -> None:
    monkeypatch.setattr(torch_compat, "num_compilers", lambda: 1)
    aside.start(CPU)
    assert aside._processes is None
    assert aside.submit({}, None, {}) == {}


def test_a_piece_is_compiled_with_the_same_settings_or_not_at_all() -> None:
    traced, [segment] = cut(lambda x: x @ x.t(), X, dynamic_dims={"x": 0})
    data = make_job(segment.module, traced.fake_mode, INDUCTOR.settings)
    assert data is not None
    assert compile_job(data).artifact
    modules, places, precision, settings, job = pickle.loads(data)
    other = compile_job(pickle.dumps((modules, places, precision, {**settings, "_inductor.config.split": "1"}, job)))
    assert other.artifact is None
    assert "_inductor.config.split" in other.reason


def test_numbers_in_a_graph_are_not_sent() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.get_attr("numbers"),))
    module = torch.fx.GraphModule({"numbers": X}, graph)
    assert make_job(module, None, INDUCTOR.settings) is None


def test_what_others_relied_on_is_relied_on_here() -> None:
    traced = trace_it(lambda x: x * 2, X, dynamic_dims={"x": 0})
    [symbol] = traced.sizes.symbols
    before = traced.sizes.guards
    torch_compat.add_size_guards(traced.fake_mode, [*before, (sympy.Ge(symbol, 3), "model.py:7")])
    torch_compat.add_size_guards(traced.fake_mode, [(sympy.Ge(symbol, 3), "model.py:7")])
    assert traced.sizes.guards[len(before) :] == ((sympy.Ge(symbol, 3), "model.py:7"),)
    assert "decided at `model.py:7`" in str(traced.sizes.violated((2,)))
    assert traced.sizes.violated((3,)) is None
