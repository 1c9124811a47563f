"""``with piecegraph.trace()`` on a CPU, where ops take the place of kernels."""

from __future__ import annotations

import csv
import gc
import gzip
import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from piecegraph.base import torch_compat
from piecegraph.errors import InputError, KernelError, SelectionError
from piecegraph.provenance.launch import Launch
from piecegraph.provenance.observe import is_attributing
from piecegraph.provenance.trace import FORMATS, Trace, open_trace
from tests.cases.known_lines import (
    Layers,
    Nest,
    Place,
    Remembers,
    compile_known,
    place_of,
    places_in_layer,
    rows,
)

VIEWS = ("aten::t", "aten::view")


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def calls_of(t: Trace) -> list[Any]:
    """The calls that were made, each once, in order."""
    called: dict[int, Any] = {}
    for launch in t.launches:
        called.setdefault(launch.instance, launch.call)
    return list(called.values())


def places_of(t: Trace) -> list[Place]:
    return [place_of(call) for call in calls_of(t) if call.op not in VIEWS]


def launches_of(t: Trace, op: str) -> list[Launch]:
    return [launch for launch in t.launches if launch.call is not None and launch.call.op == op]


def everything_is_undone() -> bool:
    return not is_attributing() and not torch_compat.is_profiling()


# ---- what is attributed


def in_layer(path: str) -> list[Place]:
    *before, last = places_in_layer(path)
    return [*before, Place("pgtest::unsafe", path, "x = unsafe(x)"), last]


def test_eager_code() -> None:
    model, x = Layers(), rows()
    with piecegraph.trace() as t:
        model(x)
    assert {launch.how for launch in t.launches} == {"call"}
    assert places_of(t) == in_layer("layers.0") + in_layer("layers.1")
    mm = launches_of(t, "aten::mm")[0]
    assert mm.call is not None
    assert mm.call.shapes == ("float32[4, 8]", "float32[8, 8]")
    lines = [line.text for line in mm.call.origins[0].stack]
    assert lines[-4:] == ["model(x)", "x = layer(x)", "x = squash(self.gate(x))", "gate = self.proj(x)"]


def test_code_that_torch_compile_compiled() -> None:
    """Of its kernels, ops are seen, with the line that called; the generated code is no line of the user's."""
    layer = torch.nn.Linear(8, 8)
    compiled = torch.compile(lambda x: torch.tanh(layer(x)))
    compiled(rows())
    with piecegraph.trace() as t:
        compiled(rows())
    (matmul,) = {launch.call for launch in launches_of(t, "aten::addmm")}
    assert matmul is not None
    assert matmul.origins[0].line is not None
    assert matmul.origins[0].line.file == __file__


def test_compiled_pieces_without_graphs() -> None:
    """Inductor's own kernels are seen as well as the ops that it calls, each with its layer."""
    fast = piecegraph.compile(Layers(), dynamic_dims={"x": 0}, capture_sizes=[4])
    with piecegraph.trace() as t:  # compiled inside, so that no option is needed
        expected = fast(rows())
    with piecegraph.trace() as t:
        assert torch.equal(fast(rows()), expected)
    assert {launch.how for launch in t.launches} == {"call"}
    generated = [launch for launch in t.launches if "cpp_fused" in launch.name]
    assert {origin.module for launch in generated for origin in launch.call.origins} >= {  # type: ignore[union-attr]
        "layers.0.gate",
        "layers.1.gate",
    }
    lines = {origin.line.text for launch in generated for origin in launch.call.origins}  # type: ignore[union-attr]
    assert lines == {"gate = torch.sigmoid(gate)", "gate.mul_(0.5)", "return gate * x", "return torch.tanh(x)"}
    matmuls = {launch.call.origins[0].module for launch in launches_of(t, "aten::mm")}  # type: ignore[union-attr]
    assert matmuls == {"layers.0.gate.proj", "layers.1.gate.proj"}


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
def test_graphs(frontend: str) -> None:
    """What runs in a simulated graph is the replay's; the op between two graphs is known."""
    fast = compile_known(Layers(), frontend=frontend)
    expected = fast(rows())
    with piecegraph.trace() as t:
        assert torch.equal(fast(rows()), expected)
    inside = [launch for launch in t.launches if launch.phase == "4"]
    assert {launch.call.op for launch in inside if launch.call} == {"replay of a graph", "pgtest::unsafe"}
    unsafe = dict.fromkeys(launch.call for launch in launches_of(t, "pgtest::unsafe"))
    assert [place_of(call).module for call in unsafe if call is not None] == ["layers.0", "layers.1"]


def test_graphs_that_are_recorded_inside_know_what_they_hold() -> None:
    fast = compile_known(Layers(), options={"provenance": False})
    with piecegraph.trace():
        fast(rows())
    assert len(fast.kernels.select(op="aten::tanh")) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_autograd(mode: Callable[[], Any]) -> None:
    x = rows()
    with mode(), piecegraph.trace() as t:
        result = Nest(1)(x)
    assert places_of(t) == [Place("aten::sin", path, "return torch.sin(self.inner(x))") for path in ("inner", "")]
    assert torch.equal(result, rows().sin().sin())


def test_the_thread_that_takes_the_trace_is_the_one_that_is_seen() -> None:
    fast = compile_known(Layers())
    fast(rows())
    seen: list[Trace] = []

    def take() -> None:
        with torch.no_grad(), piecegraph.trace() as t:
            fast(rows())
        seen.append(t)

    thread = threading.Thread(target=take)  # not the one that the model was recorded in
    thread.start()
    thread.join()
    assert launches_of(seen[0], "pgtest::unsafe")

    def run() -> None:
        with torch.no_grad():
            torch.cos(rows())

    thread = threading.Thread(target=run)
    with piecegraph.trace() as t:
        thread.start()
        thread.join()
        torch.sin(rows())
    assert launches_of(t, "aten::sin")
    assert not launches_of(t, "aten::cos")


def test_nothing_runs() -> None:
    with piecegraph.trace() as t:
        pass
    assert t.launches == ()
    assert t.notes == ("nothing ran while the trace was taken",)
    assert t.table().rows == ()
    assert t.groups().groups == ()
    assert "nothing ran" in str(t.table())
    json.dumps(t.document())


# ---- what is left behind: nothing


def test_tapes_fall_silent_again() -> None:
    before, inside = compile_known(Layers()), compile_known(Layers())
    before(rows())
    (tape,) = before._engine.recorded.tapes()
    assert tape.run is tape._replay
    with piecegraph.trace():
        assert tape.run is not tape._replay
        before(rows())
        inside(rows())
    assert tape.run is tape._replay
    (other,) = inside._engine.recorded.tapes()
    assert other.run is other._checked_replay  # it was not checked yet by a replay of its own
    inside(rows())
    assert other.run is other._replay


def test_a_weight_that_moved_is_noticed_inside_as_well() -> None:
    model = Layers(1)
    fast = compile_known(model, options={"check_addresses": "always"})
    fast(rows())
    out = model.layers[0].out
    out.weight = torch.nn.Parameter(out.weight * 2)
    x = rows()
    with piecegraph.trace():
        found = fast(x)
    torch.testing.assert_close(found, model(x))
    assert fast.stats()["events"] == {"PG515": 1}


def test_state_is_written_once() -> None:
    model, plain = Remembers(), Remembers()
    fast = compile_known(model)
    fast(rows())
    with piecegraph.trace():
        fast(rows())
    plain(rows())
    plain(rows())
    torch.testing.assert_close(model.total, plain.total)


def test_errors_inside_are_the_callers() -> None:
    fast = compile_known(Layers())
    fast(rows())
    (tape,) = fast._engine.recorded.tapes()
    broken: list[Trace] = []

    def fail() -> None:
        with piecegraph.trace() as t:
            broken.append(t)
            fast(rows())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert everything_is_undone()
    assert tape.run is tape._replay
    with pytest.raises(KernelError, match="PG734 there is no trace"):
        broken[0].table()
    with piecegraph.trace() as t:
        torch.sin(rows())
    assert launches_of(t, "aten::sin")


def test_an_op_that_fails_inside_and_is_caught() -> None:
    with piecegraph.trace() as t:
        with pytest.raises(RuntimeError):
            torch.ones(2) @ torch.ones(3)
        torch.sin(rows())
    assert launches_of(t, "aten::sin")
    assert all(launch.call is not None for launch in t.launches)


def test_one_trace_at_a_time() -> None:
    with piecegraph.trace() as t:
        torch.sin(rows())
        with pytest.raises(KernelError, match="PG734 a trace cannot be taken now.*inside of another"):
            piecegraph.trace().__enter__()
        torch.cos(rows())
    assert launches_of(t, "aten::sin")
    assert launches_of(t, "aten::cos")
    assert everything_is_undone()


def test_not_while_another_thread_takes_one() -> None:
    errors: list[KernelError] = []

    def take() -> None:
        try:
            with piecegraph.trace():
                pass
        except KernelError as error:
            errors.append(error)

    with piecegraph.trace():
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
    assert [error.code for error in errors] == ["PG734"]


def test_not_inside_of_a_profile() -> None:
    with torch.profiler.profile() as profiler:
        with pytest.raises(KernelError, match=r"PG734 .*torch.profiler is running"), piecegraph.trace():
            pass
        torch.sin(rows())
    assert any(event.name == "aten::sin" for event in profiler.events())
    with piecegraph.trace() as t:
        torch.sin(rows())
    assert launches_of(t, "aten::sin")


def test_it_cannot_be_looked_at_before_its_end(tmp_path: Path) -> None:
    with piecegraph.trace() as t:
        for look in (t.table, t.groups, t.document, lambda: t.launches, lambda: t.notes, lambda: t.diff(t)):
            with pytest.raises(KernelError, match="PG734 there is no trace yet"):
                look()
        with pytest.raises(KernelError, match="PG734"):
            t.save(tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with piecegraph.trace() as t:
        torch.sin(rows())
    assert len(list(tmp_path.iterdir())) == 1
    del t
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KernelError), piecegraph.trace(), piecegraph.trace():
        pass
    gc.collect()
    assert list(tmp_path.iterdir()) == []


# ---- what it gives


@pytest.fixture(scope="module")
def taken() -> Trace:
    with torch.no_grad(), piecegraph.trace() as t:
        for _ in range(2):
            Layers()(rows())
    return t


def test_the_table_can_be_asked(taken: Trace) -> None:
    assert {row.call for row in taken.table(op="aten.tanh").rows} == {"aten::tanh"}
    assert {row.module for row in taken.table(module="layers.*.gate.proj").rows} == {"layers.*.gate.proj"}
    (tanh,) = taken.table(op="aten::tanh").rows
    assert len(tanh.instances) == 4  # two layers, two runs: one line
    assert taken.table(line=f"known_lines.py:{tanh.line.line}").rows == (tanh,)  # type: ignore[union-attr]


def test_every_format_can_be_read_back(taken: Trace, tmp_path: Path) -> None:
    saved = {ending: taken.save(tmp_path / f"out{ending}") for ending in FORMATS}
    assert "aten::tanh" in saved[".txt"].read_text()
    assert "| " in saved[".md"].read_text()
    table = list(csv.DictReader(saved[".csv"].read_text().splitlines()))
    assert len(table) == len(taken.table().rows)
    assert list(table[0])[:2] == ["Time (%)", "Total Time (ns)"]
    assert json.loads(saved[".json"].read_text()) == json.loads(json.dumps(taken.document()))
    assert "<title>Which line launched which kernel</title>" in saved[".html"].read_text()
    plain = json.loads(saved[".trace.json"].read_text())
    assert json.loads(gzip.decompress(saved[".trace.json.gz"].read_bytes())) == plain
    tanh = [event for event in plain["traceEvents"] if event.get("name") == "aten::tanh" and event.get("ph") == "X"]
    assert any("layers.0" in json.dumps(event["args"]) for event in tanh)
    assert open_trace(saved[".trace.json.gz"]).launches


def test_what_cannot_be_saved(taken: Trace, tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match=r"PG714 out.pdf has no known ending.*\.trace\.json\.gz"):
        taken.save(tmp_path / "out.pdf")
    with pytest.raises(InputError, match="PG601 .*cannot be written"):
        taken.save(tmp_path / "no such folder" / "out.csv")


def test_the_document_is_plain(taken: Trace) -> None:
    document = taken.document()
    assert json.loads(json.dumps(document)) == document
    assert "groups" in document


def test_diff() -> None:
    with piecegraph.trace() as before:
        for _ in range(3):
            torch.sin(rows())
    with piecegraph.trace() as after:
        torch.cos(rows())
    changes = str(before.diff(after))
    assert "aten::sin" in changes
    assert "aten::cos" in changes
