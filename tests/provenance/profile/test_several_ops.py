"""What stands for several ops is a place in the model, but no call that its kernels have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import piecegraph
from piecegraph.base.origin import GraphNode, GraphRecord, LaunchCall, Origin
from piecegraph.provenance.groups.mining import mine
from piecegraph.provenance.launch import KernelProfile, Launch, Range, RawLaunch
from piecegraph.provenance.profile.marks import CALL_MARK, ByMarks
from piecegraph.provenance.profile.replays import RecordedTape, captured_calls
from piecegraph.tape.tape import STEP_MARK

MM, NONZERO = Origin("aten::mm", "layers.0.proj"), Origin("aten::nonzero", "layers.0.route")
SEVERAL = LaunchCall("aten::mm and 1 more", (MM, NONZERO), is_several=True)


def kernel(name: str, call: LaunchCall, instance: int) -> Launch:
    return Launch("kernel", name, float(instance), 1.0, "7", None, None, call, instance, "", "call")


def groups_of(call: LaunchCall) -> list[str]:
    launches = [kernel(name, call, instance) for instance in range(20) for name in ("gemm", "scan")]
    return [group.op for group in mine(KernelProfile(tuple(launches))).groups]


def test_kernels_of_several_ops_are_no_group() -> None:
    assert groups_of(LaunchCall("aten::mm", (MM,))) == ["aten::mm"]
    assert groups_of(SEVERAL) == []


def test_nor_are_they_when_they_were_captured() -> None:
    nodes = tuple(GraphNode("kernel", f"k{i}", None, None, call) for i, call in enumerate((0, 0, 1)))
    record = GraphRecord("piece 3", "8", (SEVERAL, LaunchCall("aten::mm", (MM,))), nodes)
    assert [(one.call.op, len(one.members)) for one in captured_calls(record)] == [("aten::mm", 1)]


def test_a_piece_that_another_compiler_made_stands_for_several_ops() -> None:
    def backend(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return module.forward

    options = {"provenance": True, "graph_device": "simulated"}
    fast = piecegraph.compile(
        lambda x: (x + 1).exp(), backend=backend, dynamic_dims={"x": 0}, capture_sizes=[4], options=options
    )
    fast(torch.zeros(4))
    (live,) = fast.kernels.select().kernels
    assert live.call is not None
    assert live.call.is_several
    assert [origin.op for origin in live.call.origins] == ["aten::add", "aten::exp"]


def raw(name: str, start: float, inner: int | None) -> RawLaunch:
    marks = [Range("annotation", f"{STEP_MARK} 5.0.77")]
    if inner is not None:
        marks.insert(0, Range("annotation", f"{CALL_MARK} {inner}"))
    return RawLaunch("kernel", name, start, 1.0, "7", None, None, 1, "cudaLaunchKernel", start, tuple(marks), 0)


def found_in(step: LaunchCall, launches: list[RawLaunch]) -> list[Launch]:
    calls = [LaunchCall("aten::mm", (), ("float[2]",)), LaunchCall("aten::nonzero"), None]
    marked = ByMarks(calls, {5: RecordedTape("8", (step,))}, {})
    marked.attribute(launches)
    return [marked.found[id(launch)] for launch in launches]


def test_the_ops_of_a_cut_are_told_apart_where_they_were_seen() -> None:
    found = found_in(SEVERAL, [raw("gemm", 0, 0), raw("scan", 1, 1), raw("write", 2, 1), raw("other", 3, None)])
    calls = [one.call for one in found]
    mm = LaunchCall("aten::mm", (MM,), ("float[2]",))
    nonzero = LaunchCall("aten::nonzero", (NONZERO,))
    assert calls == [mm, nonzero, nonzero, SEVERAL]
    assert found[1].instance == found[2].instance
    assert len({one.instance for one in found}) == 3


def test_all_that_a_cut_of_one_op_launches_is_that_ops() -> None:
    attention = LaunchCall("mylib::attention", (Origin("mylib::attention", "layers.0.attn"),))
    found = found_in(attention, [raw("gemm", 0, 0), raw("scan", 1, 1)])
    assert [one.call for one in found] == [attention, attention]
    assert found[0].instance == found[1].instance
