"""What only a GPU can show: memory, streams, random numbers, failing captures."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.tape.device import CudaGraphs
from tests.cases.modules import MLP, HiddenSync, Stack, attend_into, attention
from tests.graph.test_fuse import Model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def poison_pool(fast: Any) -> None:
    """Fill all free memory of the graphs' pool with NaN."""
    device = fast._engine.planner.device
    sizes = [
        block["size"]
        for segment in device.pool.snapshot()
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    assert sizes, "the pool has no free memory to poison"
    with torch.cuda.stream(device.stream), torch.cuda.use_mem_pool(device.pool):
        held = [
            torch.full((size // 4,), float("nan"), device=CUDA) for size in sorted(sizes, reverse=True) if size >= 4
        ]
    torch.cuda.synchronize()
    del held


@pytest.mark.parametrize("attend", [attention, attend_into], ids=["fresh", "out"])
@pytest.mark.parametrize(
    "arguments", [{"backend": "eager"}, {"backend": "inductor"}, {"frontend": "breakable"}], ids=str
)
def test_pool_poisoned_between_sizes(attend: Any, arguments: dict[str, Any]) -> None:
    model = Stack(attend).to(CUDA).eval()
    fast = piecegraph.compile(
        model,
        splitting_ops=["pgtest::attention", "pgtest::attention_out"],
        capture_sizes=[32, 16, 8, 4, 2],
        **arguments,
    )
    with torch.no_grad():
        fast.capture(torch.randn(32, 12, device=CUDA))
        for size in (32, 2, 16, 8, 4, 3, 29, 32, 2):
            poison_pool(fast)
            x = torch.randn(size, 12, device=CUDA)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    assert fast.stats()["coverage"] == 1.0


def test_workspaces_of_cublas_may_be_cleared_by_others() -> None:
    model = nn.Linear(32768, 64, bias=False, device=CUDA, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(64, 32768, device=CUDA, dtype=torch.bfloat16)
    fast = piecegraph.compile(model, backend="eager", capture_sizes=[64])
    expected = fast(x).clone()
    torch._C._cuda_clearCublasWorkspaces()  # as mode="reduce-overhead" does
    torch.cuda.empty_cache()
    others = [torch.full((size << 20,), 7, dtype=torch.uint8, device=CUDA) for size in (32, 16, 8, 64)]
    for _ in range(3):
        assert torch.equal(fast(x), expected)
    assert all((other == 7).all() for other in others)
    assert fast.stats()["coverage"] == 1.0


def test_a_stream_is_taken_whose_workspace_is_ours() -> None:
    graphs = CudaGraphs(CUDA)
    with torch.cuda.stream(graphs.stream):
        torch.ones(8, 8, device=CUDA) @ torch.ones(8, 8, device=CUDA)  # another's product, on a stream torch gave twice
    before = graphs.stream
    with graphs.session():
        assert torch.cuda.current_stream() == graphs.stream != before
    for _ in range(40):  # all streams that torch has
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.ones(8, 8, device=CUDA) @ torch.ones(8, 8, device=CUDA)
    with CudaGraphs(CUDA).session():
        torch.ones(8, 8, device=CUDA) @ torch.ones(8, 8, device=CUDA)


def test_random_numbers_differ_between_replays_and_follow_the_seed() -> None:
    fast = piecegraph.compile(lambda x: torch.rand_like(x), backend="eager")
    x = torch.zeros(64, device=CUDA)
    with torch.no_grad():
        first, second = fast(x), fast(x)
        torch.cuda.manual_seed(3)
        third = fast(x)
        torch.cuda.manual_seed(3)
        fourth, eager = fast(x), None
        torch.cuda.manual_seed(3)
        eager = torch.rand_like(x)
    assert not torch.equal(first, second)
    torch.testing.assert_close(third, fourth)
    torch.testing.assert_close(third, eager)


def test_a_thousand_replays_leak_nothing() -> None:
    model = Stack(attention).to(CUDA).eval()
    fast = piecegraph.compile(model, splitting_ops=[attention], capture_sizes=[16, 8], backend="eager")
    with torch.no_grad():
        x, y = torch.randn(16, 12, device=CUDA), torch.randn(5, 12, device=CUDA)
        for _ in range(10):
            fast(x), fast(y)
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        gc.collect()
        num_objects = len(gc.get_objects())
        for _ in range(500):
            fast(x), fast(y)
        torch.cuda.synchronize()
        gc.collect()
        objects_now = len(gc.get_objects())  # before anything else: reading memory statistics makes objects, too
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved
    assert objects_now - num_objects < 100


def test_outputs_are_the_callers_own() -> None:
    fast = piecegraph.compile(MLP().to(CUDA), capture_sizes=[8], backend="eager")
    with torch.no_grad():
        first = fast(torch.randn(8, 12, device=CUDA))
        kept = first.clone()
        fast(torch.randn(8, 12, device=CUDA))
    torch.testing.assert_close(first, kept, rtol=0, atol=0)


def test_outputs_without_clone_are_valid_until_the_next_call() -> None:
    model = MLP().to(CUDA)
    fast = piecegraph.compile(model, capture_sizes=[8], backend="eager", options={"clone_outputs": False})
    with torch.no_grad():
        x = torch.randn(8, 12, device=CUDA)
        first = fast(x)
        torch.testing.assert_close(first, model(x))
        second = fast(torch.randn(8, 12, device=CUDA))
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_piece_that_cannot_be_captured_runs_eagerly_and_the_rest_goes_on(backend: str) -> None:
    model = HiddenSync().to(CUDA).eval()
    fast = piecegraph.compile(
        model, splitting_ops=[attention], capture_sizes=[8, 4], backend=backend, on_fallback="ignore"
    )
    with torch.no_grad():
        for size in (8, 4, 8, 3):
            x = torch.randn(size, 12, device=CUDA)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    stats = fast.stats()
    assert stats["events"]["PG401"] == 1
    assert stats["plans"][0]["sizes"]["8"] == {**stats["plans"][0]["sizes"]["8"], "graphs": 1, "eager_steps": 2}
    assert stats["coverage"] == 1.0
    # and the allocator is in order: an ordinary graph can be captured and replayed afterwards
    graph = torch.cuda.CUDAGraph()
    a = torch.ones(8, device=CUDA)
    with torch.cuda.graph(graph):
        b = a + 1
    graph.replay()
    assert torch.equal(b, torch.full((8,), 2.0, device=CUDA))


def test_out_of_memory_at_one_size_drops_that_size() -> None:
    class Grows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            big = x.new_ones(x.shape[0], x.shape[0] * 4096)
            return x + big.sum(1, keepdim=True) / (x.shape[0] * 4096)

    free = torch.cuda.mem_get_info()[0]
    too_large = int((free / 4 / 4096) ** 0.5 * 1.5)
    fast = piecegraph.compile(
        Grows().to(CUDA), dynamic_dims={"x": 0}, capture_sizes=[too_large, 16], backend="eager", on_fallback="ignore"
    )
    with torch.no_grad():
        x = torch.randn(16, 3, device=CUDA)
        torch.testing.assert_close(fast(x), x + 1)
        torch.testing.assert_close(fast(x), x + 1)
    stats = fast.stats()
    assert list(stats["plans"][0]["sizes"]) == ["16"]
    assert stats["events"]["PG402"] >= 1
    torch.cuda.empty_cache()


class ForksStream(nn.Module):
    """The function of the failing log: cache writes on a second stream, joined again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = MLP(), MLP()
        self.side = torch.cuda.Stream()
        self.register_buffer("keys", torch.zeros(64, 12))
        self.register_buffer("values", torch.zeros(64, 12))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            self.keys[: x.shape[0]] = y
        self.values[: x.shape[0]] = y * 2
        current.wait_stream(self.side)
        return self.last(self.keys[: x.shape[0]] + self.values[: x.shape[0]])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_stream_in_the_graph_ends_in_a_plan_with_a_reason(backend: str) -> None:
    model = ForksStream().to(CUDA).eval()
    fast = piecegraph.compile(model, dynamic_dims={"x": 0}, capture_sizes=[8, 4], backend=backend, on_fallback="raise")
    with torch.no_grad():
        for size in (8, 4, 8):
            x = torch.randn(size, 12, device=CUDA)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    assert any("stream" in cut.reason for cut in fast.plan.cuts)
    assert len(fast.plan.pieces) == 2


def test_calls_from_different_streams_are_ordered() -> None:
    fast = piecegraph.compile(lambda x: (x @ x) @ x, backend="eager")
    side = torch.cuda.Stream()
    with torch.no_grad():
        inputs = [torch.randn(1024, 1024, device=CUDA) / 32 for _ in range(8)]
        expected = [(x @ x) @ x for x in inputs]
        fast(inputs[0])
        torch.cuda.synchronize()
        found = []
        for i, x in enumerate(inputs):
            with torch.cuda.stream(side if i % 2 else torch.cuda.default_stream()):
                found.append(fast(x))
        torch.cuda.synchronize()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_weights_that_move_are_noticed() -> None:
    model = MLP().to(CUDA)
    fast = piecegraph.compile(model, capture_sizes=[8], backend="eager")
    x = torch.randn(8, 12, device=CUDA)
    with torch.no_grad():
        fast(x)
        model.up.weight.data = model.up.weight.data * 2
        torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
    assert fast.stats()["events"] == {"PG515": 1}


def test_cpu_tensor_for_a_cuda_plan() -> None:
    model = MLP().to(CUDA)
    fast = piecegraph.compile(model, capture_sizes=[8], backend="eager", on_fallback="ignore")
    with torch.no_grad():
        fast(torch.randn(8, 12, device=CUDA))
        with pytest.raises(piecegraph.errors.CallError, match=r"PG502.*x is on cpu, planned for cuda:0"):
            fast(torch.randn(8, 12))
        x = torch.randn(8, 12, device=CUDA)
        torch.testing.assert_close(fast(x), model(x))


def test_two_models_side_by_side_share_nothing() -> None:
    target, draft = MLP().to(CUDA), MLP().to(CUDA)
    fast_target = piecegraph.compile(target, capture_sizes=[8], backend="eager")
    fast_draft = piecegraph.compile(draft, capture_sizes=[8], backend="eager")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(8, 12, device=CUDA)
            a, b = fast_target(x), fast_draft(x)
            torch.testing.assert_close(a, target(x))
            torch.testing.assert_close(b, draft(x))
    assert fast_target._engine.planner.device.pool.id != fast_draft._engine.planner.device.pool.id


def test_close_gives_the_memory_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    fast = piecegraph.compile(lambda x: (x @ x) @ x, backend="eager")
    with torch.no_grad():
        fast(torch.randn(2048, 2048, device=CUDA))
        assert torch.cuda.memory_reserved() > before
    fast.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 64 * 2**20


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_fused_linears(backend: str) -> None:
    model = Model().to(CUDA).eval()
    options = {"fuse_linears": True}
    fast = piecegraph.compile(model, splitting_ops=[attention], capture_sizes=[8, 4], backend=backend, options=options)
    with torch.no_grad():
        for size in (8, 4, 3, 8):
            x = torch.randn(size, 12, device=CUDA)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    assert "fused linears: 8 groups" in fast.explain()


def test_random_numbers_of_a_function_of_no_tensors() -> None:
    fast = piecegraph.compile(lambda: torch.randn(6, device=CUDA), backend="eager", on_fallback="ignore")
    for seed in range(3):
        torch.manual_seed(seed)
        found = fast()
        torch.manual_seed(seed)
        assert torch.equal(found, torch.randn(6, device=CUDA))


def test_a_result_that_is_elsewhere_when_it_is_captured() -> None:
    def attend(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._efficient_attention_forward(q, q, q, None, None, None, None, None, 0.5, 0, False)

    fast = piecegraph.compile(attend, frontend="breakable", backend="eager", on_fallback="ignore")
    q = torch.randn(1, 8, 2, 16, device=CUDA, dtype=torch.float16)
    with torch.no_grad():
        for _ in range(3):
            found, expected = fast(q), attend(q)
            assert [t.device for t in found if isinstance(t, torch.Tensor)] == [
                t.device for t in expected if isinstance(t, torch.Tensor)
            ]
    assert set(fast.stats()["events"]) <= {"PG405"}
