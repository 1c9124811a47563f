"""Cutting: by op object, in order, whole regions together, and with nothing lost. Random graphs included."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import piecegraph
from piecegraph.base.events import EventLog
from piecegraph.base.progress import Progress
from piecegraph.errors import LowerError
from piecegraph.graph import cut_rules
from piecegraph.graph.compile import Lowering
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.fx_nodes import is_size
from piecegraph.graph.lower import lower
from piecegraph.graph.split import Segment, split
from tests.cases.modules import attention, two_results, unsafe
from tests.graph.test_trace import trace_it

EAGER = Lowering("eager", (), {})


def cut(
    function: Any, *args: Tensor, ops: Any = "auto", dynamic_dims: Any = "auto", full: bool = False
) -> tuple[Any, tuple[Segment, ...]]:
    traced = trace_it(function, *args, dynamic_dims=dynamic_dims)
    return traced, split(traced, CutRules(ops), full=full)


def run_segments(traced: Any, segments: tuple[Segment, ...], *args: Tensor) -> list[Any]:
    program, _ = lower(traced, segments, EAGER, EventLog("raise"), Progress(False))
    sizes = traced.signature.match(traced.signature.names, list(args), None, args, {}).sizes
    return program.at(sizes).run(args)


# --- which ops cut


def attend(x: Tensor) -> Tensor:
    q = x.view(-1, 2, 6) * 2
    return attention(q, q, q).reshape(-1, 12) + 1


PACKET = torch.ops.pgtest.attention


@pytest.mark.parametrize("op", [attention, PACKET, PACKET.default, "pgtest::attention", "pgtest::attention.default"])
def test_every_way_to_name_a_custom_op_cuts(op: Any) -> None:
    _, segments = cut(attend, torch.ones(4, 12), ops=[op])
    assert [segment.verdict is not None for segment in segments] == [False, True, False]
    assert segments[1].title == "pgtest::attention"
    assert segments[1].verdict.reason == "listed in splitting_ops"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: torch.nn.functional.linear(x, x) + 1, torch.ops.aten.linear),
        (lambda x: torch.nn.functional.linear(x, x) + 1, torch.nn.functional.linear),
        (lambda x: (x @ x) + 1, "aten::matmul"),
        (lambda x: x.matmul(x) + 1, torch.ops.aten.matmul),
        (lambda x: torch.ops.aten.mm(x, x) + 1, "aten::mm"),
        (lambda x: torch.ops.aten.add.Tensor(x, x) * 2, torch.ops.aten.add.Tensor),
    ],
)
def test_ops_are_matched_by_object_however_they_are_called(function: Any, op: Any) -> None:
    _, segments = cut(function, torch.ones(4, 4), ops=[op])
    assert sum(segment.verdict is not None for segment in segments) == 1


def test_another_overload_does_not_cut() -> None:
    _, segments = cut(lambda x: torch.ops.aten.add.Tensor(x, x) * 2, torch.ones(4), ops=[torch.ops.aten.add.Scalar])
    assert [segment.verdict for segment in segments] == [None]


def test_unsafe_tag_cuts_by_itself() -> None:
    _, segments = cut(lambda x: unsafe(x * 2) + 1, torch.ones(4))
    assert segments[1].verdict is not None
    assert "cudagraph_unsafe" in segments[1].verdict.reason


def test_registered_ops_cut_under_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_rules, "_registered", dict(cut_rules._registered))
    piecegraph.register_cut_op("pgtest::two_results", "it is registered in this test")
    _, segments = cut(lambda x: two_results(x * 2)[0] + 1, torch.ones(4, 3))
    assert segments[1].verdict is not None
    assert segments[1].verdict.reason == "it is registered in this test"
    _, listed = cut(lambda x: two_results(x * 2)[0] + 1, torch.ones(4, 3), ops=[])
    assert [segment.verdict for segment in listed] == [None]


def test_host_reads_and_data_dependent_shapes_cut_and_what_follows_from_them_stays_eager() -> None:
    def pick(x: Tensor) -> Tensor:
        y = x * 2
        picked = y[y > 0].sum()
        return (y + picked) * 3

    traced, segments = cut(pick, torch.randn(6))
    assert [segment.verdict is not None for segment in segments] == [False, True, False]
    x = torch.randn(6)
    torch.testing.assert_close(run_segments(traced, segments, x), [pick(x)])


def test_a_full_graph_refuses_what_must_be_cut_and_ignores_wishes() -> None:
    _, segments = cut(attend, torch.ones(4, 12), ops=[attention], full=True)
    assert len(segments) == 1
    with pytest.raises(LowerError, match="PG301 pgtest::unsafe.*test_split.py"):
        cut(lambda x: unsafe(x * 2) + 1, torch.ones(4), full=True)


def test_a_tuple_returning_cut_keeps_its_items() -> None:
    def both(x: Tensor) -> Tensor:
        doubled, summed = two_results(x * 2)
        return doubled + summed[:, None]

    traced, segments = cut(both, torch.ones(4, 3), ops=[two_results])
    assert [node.target for node in segments[1].nodes[1:]] == [operator.getitem] * 2
    assert all(isinstance(node.meta["example_value"], Tensor) for segment in segments for node in segment.outputs)
    x = torch.randn(4, 3)
    torch.testing.assert_close(run_segments(traced, segments, x), [both(x)])


def test_sizes_do_not_cross() -> None:
    def sized(x: Tensor) -> Tensor:
        size = x.size()
        double = x.shape[0] * 2
        y = attention(x.view(-1, 2, 6), x.view(-1, 2, 6), x.view(-1, 2, 6))
        return y.reshape(size) + torch.ones(double, 12)[: size[0]] + y.new_zeros(y.size(0), 1)

    traced, segments = cut(sized, torch.ones(4, 12), ops=[attention], dynamic_dims={"x": 0})
    assert not any(is_size(node) for segment in segments for node in (*segment.nodes, *segment.outputs))
    x = torch.randn(7, 12)
    torch.testing.assert_close(run_segments(traced, segments, x), [sized(x)])


# --- streams


def test_everything_between_a_fork_and_its_join_is_one_cut() -> None:
    side, main = torch.Stream(device="cpu"), torch.Stream(device="cpu")

    def forks(x: Tensor) -> Tensor:
        y = x * 2
        side.wait_stream(main)
        with side:
            z = y + 1
        z = attention(z.view(-1, 2, 6), z.view(-1, 2, 6), z.view(-1, 2, 6)).reshape(-1, 12)
        main.wait_stream(side)
        return z * 3

    _, segments = cut(forks, torch.ones(4, 12), ops=[attention])
    reasons = [segment.verdict.reason if segment.verdict else None for segment in segments]
    assert reasons == [None, "lies between a fork to another CUDA stream and its join", None]
    values = [node.meta["example_value"] for segment in segments for node in segment.outputs]
    assert all(isinstance(value, Tensor) for value in values)


def test_a_stream_that_is_only_asked_something_is_a_cut() -> None:
    side = torch.Stream(device="cpu")

    def asks(x: Tensor) -> Tensor:
        side.query()
        return x * 2

    _, segments = cut(asks, torch.ones(4))
    assert [segment.verdict is not None for segment in segments] == [True, False]


# --- any graph

OPS = [
    lambda a, b: a + b,
    lambda a, b: a * 2 - b,
    lambda a, b: torch.relu(a) + b[:1],
    lambda a, b: attention(a.view(-1, 2, 6), b.view(-1, 2, 6), a.view(-1, 2, 6)).reshape(-1, 12),
    lambda a, b: two_results(a)[0] + b,
    lambda a, b: a + two_results(b)[1][:, None],
    lambda a, b: a.clone().add_(b),
    lambda a, b: a[: a.shape[0] * 2 // 2] + b.new_ones(b.shape[0], 1),
]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(range(len(OPS))), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.sets(st.sampled_from(["pgtest::attention", "pgtest::two_results", "aten::add", "aten::relu"])),
    st.integers(1, 6),
)
def test_any_graph_cut_anywhere_computes_the_same(
    program: list[tuple[int, int, int]], ops: set[str], size: int
) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        values = [x, x * 0.5]
        for op, first, second in program:
            values.append(OPS[op](values[first % len(values)], values[second % len(values)]))
        return values[-1], values[len(values) // 2]

    traced, segments = cut(function, torch.ones(3, 12), ops=sorted(ops), dynamic_dims={"x": 0})
    covered = [node for segment in segments for node in segment.nodes]
    assert len(covered) == len(set(covered))
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    heads = [node for node in covered if node.target is not operator.getitem]
    assert heads == sorted(heads, key=order.__getitem__)
    for segment in segments:
        assert all(isinstance(node.meta["example_value"], Tensor) for node in segment.outputs)
    x = torch.randn(size, 12)
    expected = dict(zip(traced.output_nodes, run_segments(traced, segments, x), strict=True))
    found = [x if not hasattr(leaf, "node") else expected[leaf.node] for leaf in traced.results]
    torch.testing.assert_close(tuple(found), function(x), rtol=1e-4, atol=1e-5)
