"""Kernels of replays, matched with what graphs are known to hold: on launches that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from piecegraph.base.origin import GraphNode, GraphRecord, LaunchCall, Origin, WorkKind
from piecegraph.provenance.launch import KernelProfile, Launch, RawLaunch
from piecegraph.provenance.profile.marks import CALL_MARK, Announcer
from piecegraph.provenance.profile.replays import RecordedGraph, RecordedTape, captured_calls, match_replay
from piecegraph.provenance.profile.saved import saved_members, saved_profile
from piecegraph.provenance.profile.take import MarkedProfile
from piecegraph.tape.tape import STEP_MARK
from tests.cases.kernel_traces import TraceBuilder

LINEAR = LaunchCall("aten::mm", (Origin("aten::linear", "layers.0.up"),))
COPY = LaunchCall("aten::copy_", (Origin("aten::copy_", "layers.0"),))
ATTENTION = LaunchCall("mylib::attention", (Origin("mylib::attention", "layers.0.attn"),))


def node(kind: WorkKind, name: str, call: int | None, node_id: int | None = None) -> GraphNode:
    return GraphNode(kind, name, (1, 1, 1) if kind == "kernel" else None, None, call, node_id)


def graph(*nodes: GraphNode, off: frozenset[int] = frozenset()) -> RecordedGraph:
    return RecordedGraph(GraphRecord("piece 0", "4", (LINEAR, COPY), nodes), off)


GEMM, REDUCE = node("kernel", "gemm", 0), node("kernel", "reduce", 0)
MEMCPY, MEMSET = node("memcpy", "", 1), node("memset", "", 0)


def ran(name: str, start: float = 0.0, *, kind: WorkKind = "kernel", node_id: int | None = None) -> RawLaunch:
    return RawLaunch(kind, name, start, 1.0, "7", None, None, 5, "cudaGraphLaunch", 0.0, (), -1, node_id)


# ---- one replay


def test_by_position() -> None:
    assert match_replay([ran("gemm", 1), ran("reduce", 2)], graph(GEMM, REDUCE)) == ([0, 0], "position")


def test_by_position_in_time_and_not_in_the_file() -> None:
    later_first = [ran("Memcpy DtoD", 3, kind="memcpy"), ran("gemm", 1), ran("reduce", 2)]
    assert match_replay(later_first, graph(GEMM, REDUCE, MEMCPY)) == ([1, 0, 0], "position")


def test_by_id_of_which_the_lower_half_counts() -> None:
    """The upper half is the number of the running graph, which was not there yet when the nodes were read."""
    nodes = (node("kernel", "gemm", 0, (7 << 32) | 10), node("kernel", "gemm", 1, (7 << 32) | 11))
    launches = [ran("gemm", 1, node_id=(9 << 32) | 11), ran("gemm", 2, node_id=(9 << 32) | 10)]
    assert match_replay(launches, graph(*nodes)) == ([1, 0], "node id")


def test_by_id_a_part_of_a_replay_is_enough() -> None:
    """The profiler may have lost some."""
    nodes = (node("kernel", "gemm", 0, 10), node("kernel", "add", 1, 11))
    assert match_replay([ran("add", 1, node_id=11)], graph(*nodes)) == ([1], "node id")


def test_ids_that_do_not_fit_are_not_believed() -> None:
    nodes = (node("kernel", "gemm", 0, 10), node("kernel", "add", 1, 11))
    swapped = [ran("gemm", 1, node_id=11), ran("add", 2, node_id=10)]
    assert match_replay(swapped, graph(*nodes)) == ([0, 1], "position")
    unknown = [ran("gemm", 1, node_id=98), ran("add", 2, node_id=99)]
    assert match_replay(unknown, graph(*nodes)) == ([0, 1], "position")
    some = [ran("gemm", 1, node_id=10), ran("add", 2)]
    assert match_replay(some, graph(*nodes)) == ([0, 1], "position")


@pytest.mark.parametrize(
    "launches",
    [
        [ran("gemm", 1), ran("other", 2)],
        [ran("reduce", 1), ran("gemm", 2)],
        [ran("gemm", 1)],
        [ran("gemm", 1), ran("reduce", 2), ran("reduce", 3)],
        [ran("gemm", 1), ran("Memset (Device)", 2, kind="memset")],
    ],
    ids=["another name", "another order", "one too few", "one too many", "another kind"],
)
def test_what_does_not_agree_is_not_guessed(launches: list[RawLaunch]) -> None:
    assert match_replay(launches, graph(GEMM, REDUCE)) == ([None] * len(launches), "step")


def test_copies_and_memsets_may_run_as_kernels_of_the_driver() -> None:
    recorded = graph(MEMSET, GEMM, MEMCPY)
    as_kernels = [ran("memset32_post", 1), ran("gemm", 2), ran("memcpy32_post", 3)]
    assert match_replay(as_kernels, recorded) == ([0, 0, 1], "position")
    as_themselves = [ran("Memset (Device)", 1, kind="memset"), ran("gemm", 2), ran("Memcpy DtoD", 3, kind="memcpy")]
    assert match_replay(as_themselves, recorded) == ([0, 0, 1], "position")
    swapped = [ran("memcpy32_post", 1), ran("gemm", 2), ran("memset32_post", 3)]
    assert match_replay(swapped, recorded)[1] == "step"


def test_nodes_that_are_off_do_not_run() -> None:
    recorded = graph(GEMM, REDUCE, MEMCPY, off=frozenset({1}))
    launches = [ran("gemm", 1), ran("Memcpy DtoD", 2, kind="memcpy")]
    assert match_replay(launches, recorded) == ([0, 1], "position")
    assert match_replay([ran("gemm", 1), ran("reduce", 2), launches[1]], recorded)[1] == "step"


def test_nodes_that_do_no_work_show_in_no_trace() -> None:
    recorded = graph(GEMM, node("op", "cudaGraphNodeTypeEventRecord", 1), MEMCPY)
    assert match_replay([ran("gemm", 1), ran("memcpy32_post", 2)], recorded) == ([0, 1], "position")


def test_a_node_that_nobody_put_there() -> None:
    assert match_replay([ran("gemm", 1)], graph(node("kernel", "gemm", None))) == ([None], "position")


def test_what_the_calls_of_a_graph_put_into_it() -> None:
    record = graph(GEMM, MEMCPY, REDUCE, node("kernel", "loose", None)).record
    linear, copy = captured_calls(record)
    assert (linear.call, linear.phase, [member.name for member in linear.members]) == (LINEAR, "4", ["gemm", "reduce"])
    assert (copy.call, [member.kind for member in copy.members]) == (COPY, ["memcpy"])


# ---- whole traces


TAPE = 3


def step_mark(step: int, serial: int, tape: int = TAPE) -> str:
    return f"{STEP_MARK} {tape}.{step}.{serial}"


def read(trace: TraceBuilder, folder: Path, *steps: RecordedGraph | LaunchCall | str) -> KernelProfile:
    """What a profile tells that was taken while such a tape was there."""
    announcer = Announcer()
    announcer.calls = [None, COPY]
    profile = MarkedProfile(trace.save(folder / "trace.json"), announcer)
    profile.tapes = {TAPE: RecordedTape("8 rows", steps)}
    return profile.read()


def said(launches: tuple[Launch, ...]) -> list[tuple[str, str | None, str, str]]:
    return [(one.name, None if one.call is None else one.call.op, one.phase, one.how) for one in launches]


def replayed_twice() -> TraceBuilder:
    trace = TraceBuilder()
    for serial in range(2):
        with trace.annotation(step_mark(0, serial)):
            trace.replay([("kernel", "gemm"), ("kernel", "reduce"), ("memcpy", "Memcpy DtoD")])
    return trace


def test_replays_inside_marks(tmp_path: Path) -> None:
    found = read(replayed_twice(), tmp_path, graph(GEMM, REDUCE, MEMCPY))
    one_replay = [
        ("gemm", "aten::mm", "8 rows", "position"),
        ("reduce", "aten::mm", "8 rows", "position"),
        ("Memcpy DtoD", "aten::copy_", "8 rows", "position"),
    ]
    assert said(found.launches) == one_replay * 2
    gemm, reduce, copy, again, *_ = (launch.instance for launch in found.launches)
    assert gemm == reduce
    assert len({gemm, copy, again}) == 3  # what one call launched in one replay
    assert [launch.replay for launch in found.launches] == [0, 0, 0, 1, 1, 1]
    assert [call.call for call in found.captured] == [LINEAR, COPY]
    assert found.notes == ()


def test_a_saved_profile_keeps_its_replays(tmp_path: Path) -> None:
    found = read(replayed_twice(), tmp_path, graph(GEMM, REDUCE, MEMCPY))
    members = json.loads(json.dumps(dict(saved_members(found))))
    assert saved_profile(members, "") == found
    members["piecegraph"]["version"] = 1  # as it was written before there were any
    members["piecegraph.0"] = [row[:-1] for row in members["piecegraph.0"]]
    earlier = saved_profile(members, "")
    assert earlier is not None
    assert earlier.launches == tuple(replace(launch, replay=-1) for launch in found.launches)


def test_replays_by_the_ids_of_nodes(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.annotation(step_mark(0, 0)):
        trace.replay([("kernel", "gemm"), ("kernel", "gemm")], node_ids=[(9 << 32) | 11, (9 << 32) | 10], graph_id=9)
    found = read(trace, tmp_path, graph(node("kernel", "gemm", 0, 10), node("kernel", "gemm", 1, 11)))
    assert said(found.launches) == [
        ("gemm", "aten::copy_", "8 rows", "node id"),
        ("gemm", "aten::mm", "8 rows", "node id"),
    ]


def test_a_graph_that_was_recorded_without_provenance(tmp_path: Path) -> None:
    found = read(replayed_twice(), tmp_path, "piece 0")
    assert {(call, phase, how) for _, call, phase, how in said(found.launches)} == {(None, "8 rows", "step")}
    assert {launch.instance for launch in found.launches} == {-1}
    assert any(note.startswith("1 graphs were recorded without provenance (piece 0)") for note in found.notes)


def test_kernels_that_are_not_those_of_the_graph(tmp_path: Path) -> None:
    found = read(replayed_twice(), tmp_path, graph(GEMM, REDUCE))
    assert {(call, phase, how) for _, call, phase, how in said(found.launches)} == {(None, "8 rows", "step")}
    assert any("the kernels of piece 0 at 8 rows are not those that were captured" in note for note in found.notes)


def test_the_step_between_two_graphs(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.annotation(step_mark(0, 0)):
        trace.replay([("kernel", "gemm")])
    with trace.annotation(step_mark(1, 0)), trace.op("mylib::attention"):
        trace.kernel("attend")
        with trace.op("aten::add"):
            trace.kernel("combine")
    found = read(trace, tmp_path, graph(GEMM), ATTENTION)
    assert said(found.launches) == [
        ("gemm", "aten::mm", "8 rows", "position"),
        ("attend", "mylib::attention", "8 rows", "call"),
        ("combine", "mylib::attention", "8 rows", "call"),
    ]
    _, attend, combine = found.launches
    assert attend.instance == combine.instance  # one call, whatever it calls in turn


def test_a_steps_word_counts_for_all_inside_it(tmp_path: Path) -> None:
    """What watches ops of eager code also sees those of an op between graphs."""
    trace = TraceBuilder()
    with trace.annotation(step_mark(0, 0)), trace.annotation(f"{CALL_MARK} 1"), trace.op("aten::copy_"):
        trace.kernel("attend")
    with trace.annotation(f"{CALL_MARK} 1"), trace.op("aten::copy_"):
        trace.kernel("copy")
    found = read(trace, tmp_path, ATTENTION)
    assert said(found.launches) == [
        ("attend", "mylib::attention", "8 rows", "call"),
        ("copy", "aten::copy_", "", "call"),
    ]


def test_what_torch_launches_for_a_replay(tmp_path: Path) -> None:
    """The numbers for random kernels, say, are written before the graph is launched."""
    trace = TraceBuilder()
    with trace.annotation(step_mark(0, 0)):
        trace.kernel("fill")
        trace.replay([("kernel", "gemm")])
    found = read(trace, tmp_path, graph(GEMM))
    assert said(found.launches)[0] == ("fill", "replay of a graph", "8 rows", "call")
    assert said(found.launches)[1][1] == "aten::mm"


def test_a_tape_that_is_gone_and_a_replay_that_is_not_ours(tmp_path: Path) -> None:
    trace = TraceBuilder()
    with trace.annotation(step_mark(0, 0, tape=99)):
        trace.replay([("kernel", "gemm")])
    with trace.annotation("decode"):
        trace.replay([("kernel", "gemm")])
    trace.replay([("kernel", "gemm")])
    found = read(trace, tmp_path, graph(GEMM))
    assert [(call, how) for _, call, _, how in said(found.launches)] == [(None, "none"), (None, "step"), (None, "none")]
    assert found.captured == ()
