"""Compiled code, line by line: what is launched there, and from where in the model, each layer told apart."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from piecegraph.base.events import EventLog
from piecegraph.base.origin import LaunchCall
from piecegraph.base.progress import Progress
from piecegraph.base.torch_compat import CompiledSource
from piecegraph.graph.compile import Lowering, structural_key
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.fx_nodes import op_name
from piecegraph.graph.lower import lower
from piecegraph.graph.program import Program, Step, StepSource, run_plainly
from piecegraph.graph.split import split
from piecegraph.provenance.origins.fx import launch_calls, origins_of
from piecegraph.provenance.origins.inductor import wrapper_launches
from tests.cases.modules import attention, two_results, unsafe
from tests.graph.test_trace import trace_it

LAUNCH = re.compile(r"\s*(?:\w+ = )?(cpp_fused_\w+|extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)\(")
"""An independent notion of a launch: what such a line looks like on a CPU."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass(frozen=True)
class Ran:
    """A step that was run, and the lines of its compiled source that were."""

    step: Step
    lines: tuple[int, ...]

    @property
    def source(self) -> StepSource:
        assert self.step.source is not None
        return self.step.source

    @property
    def compiled(self) -> CompiledSource:
        assert self.source.compiled is not None
        return self.source.compiled

    def launches(self) -> list[tuple[str, LaunchCall | None]]:
        """(what the line launches, what we say of the line) of each line that launches something, in order."""
        text, calls = self.compiled.code.splitlines(), launch_calls(self.source)
        found = [(LAUNCH.match(text[line - 1]), calls.get(line)) for line in self.lines]
        assert all((match is None) == (call is None) for match, call in found)
        return [(match[1], call) for match, call in found if match is not None]


def lowered(function: Any, *args: Tensor, ops: Any, provenance: bool, sizes: Any = None) -> tuple[Any, Program]:
    traced = trace_it(function, *args, dynamic_dims=sizes or {"x": 0})
    segments = split(traced, CutRules(ops), full=False)
    lowering = Lowering("inductor", (), {}, provenance=provenance)
    return traced, lower(traced, segments, lowering, EventLog("raise"), Progress(False))[0]


def run_traced(function: Any, *args: Tensor, ops: Any, provenance: bool, sizes: Any = None) -> list[Ran]:
    """Compile, call, and watch the lines of all compiled pieces."""
    traced, program = lowered(function, *args, ops=ops, provenance=provenance, sizes=sizes)
    call = traced.signature.match(traced.signature.names, list(args), None, args, {})
    ran: list[Ran] = []

    def run_step(step: Step, *rest: Any) -> Any:
        file = step.source.compiled.file if step.source and step.source.compiled else None
        lines: list[int] = []

        def watch(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != file:
                return None
            if event == "line":
                lines.append(frame.f_lineno)
            return watch

        before = sys.gettrace()
        sys.settrace(watch)
        try:
            return run_plainly(step, *rest)
        finally:
            sys.settrace(before)
            ran.append(Ran(step, tuple(lines)))

    program.at(call.sizes).run(call.tensors, run_step)
    return ran


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(12)
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)  # NORM
        h = F.silu(self.up(h))  # UP
        q = self.down(h) + x  # DOWN
        q = q.view(-1, 2, 6)
        return attention(q, q, q).reshape(-1, 12)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)  # LAYER
        return x


def line_of(cls: type, mark: str) -> int:
    lines, first = inspect.getsourcelines(cls)
    return first + next(i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}"))


EXPECTED = {
    # The main origin of each launch of a layer, in order, and the ops of all its origins.
    "kernel 1": ("norm", "NORM", {"aten::rms_norm"}),
    "extern 1": ("up", "UP", {"aten::linear"}),
    "kernel 2": ("", "UP", {"aten::silu"}),
    "extern 2": ("down", "DOWN", {"aten::linear", "aten::add"}),
}


def check_layers(ran: list[Ran], *, has_map: bool) -> None:
    pieces = [one for one in ran if one.step.is_captured][:3]
    assert pieces[1].compiled == pieces[2].compiled  # one source for two layers
    for index, piece in enumerate(pieces):
        launches = piece.launches()
        assert [name.split("_")[0] for name, _ in launches] == ["cpp", "extern", "cpp", "extern"]
        for (name, call), (module, mark, ops) in zip(launches, EXPECTED.values(), strict=True):
            assert call is not None
            if name.startswith("cpp") and not has_map:
                assert call.origins == ()
                continue
            main = call.origins[0]
            assert main.module == f"layers.{index}.{module}".rstrip(".")
            assert main.line is not None
            assert (main.line.file, main.line.line) == (__file__, line_of(Layer, mark))
            assert [line.line for line in main.stack] == [line_of(Stack, "LAYER"), line_of(Layer, mark)]
            found = {origin.op for origin in call.origins} - {"aten::reshape"}
            assert found == ops or (not has_map and found <= ops)  # torch 2.11 leaves out what was merged into an op
            assert call.op == ("aten::addmm" if name.startswith("extern") else name)


@pytest.fixture(scope="module")
def stacks() -> dict[bool, list[tuple[bool, list[Ran]]]]:
    """By whether the map is wanted: what two runs ran, and whether it was cached; in one cache, without it first."""
    found: dict[bool, list[tuple[bool, list[Ran]]]] = {False: [], True: []}
    with fresh_cache(), torch.no_grad():
        for provenance, runs in found.items():
            for _ in range(2):
                counters.clear()
                ran = run_traced(Stack().forward, torch.randn(8, 12), ops=[attention], provenance=provenance)
                runs.append((counters["aot_autograd"]["autograd_cache_hit"] > 0, ran))
    return found


def test_every_launch_is_told_by_layer_module_and_line(stacks: dict[bool, list[tuple[bool, list[Ran]]]]) -> None:
    """What was cached without the map is not used where the map is wanted."""
    assert [is_cached for is_cached, _ in stacks[True]] == [False, True]
    for _, ran in stacks[True]:
        check_layers(ran, has_map=True)


def test_comments_alone_tell_the_calls_of_ops(stacks: dict[bool, list[tuple[bool, list[Ran]]]]) -> None:
    assert [is_cached for is_cached, _ in stacks[False]] == [False, True]
    for _, ran in stacks[False]:
        check_layers(ran, has_map=False)


def with_view(x: Tensor) -> Tensor:
    return unsafe(x.view(-1, 6).exp() + 1)


def with_reshape(x: Tensor) -> Tensor:
    return unsafe(x.reshape(-1, 6).exp() + 1)


def test_a_cached_wrapper_of_a_graph_with_other_names_is_not_taken() -> None:
    with fresh_cache():
        for function, op in ((with_view, "aten::view"), (with_reshape, "aten::reshape")):
            (_, call), *_ = run_traced(function, torch.randn(8, 12), ops=[unsafe], provenance=True)[0].launches()
            assert call is not None
            assert {origin.op for origin in call.origins} == {op, "aten::exp", "aten::add"}
            assert call.origins[0].op == "aten::add"


def test_provenance_is_no_part_of_a_pieces_key() -> None:
    traced = trace_it(with_view, torch.randn(8, 12))
    module = split(traced, CutRules([unsafe]), full=False)[0].module
    keys = {structural_key(module, Lowering("inductor", (), {}, provenance=wanted)) for wanted in (False, True)}
    assert len(keys) == 1


class Odd(nn.Module):
    """A fallback, a write in place, and work outside of any submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(12))
        self.proj = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y = two_results(self.proj(x[None]))[0][0]  # FALLBACK
        self.seen.add_(y.sum(0))  # INPLACE
        return attention(*[y.view(-1, 2, 6)] * 3)


@pytest.mark.parametrize("provenance", [True, False])
def test_fallbacks_and_writes_in_place(provenance: bool) -> None:
    piece = run_traced(Odd().forward, torch.randn(8, 12), ops=[attention], provenance=provenance)[0]
    calls = {call.op: call for _, call in piece.launches() if call is not None}
    fallback = calls["pgtest::two_results"]
    assert [origin.op for origin in fallback.origins] == ["pgtest::two_results"]
    assert str(fallback.origins[0].line) == f"{Path(__file__).name}:{line_of(Odd, 'FALLBACK')}"
    assert [(origin.op, origin.module) for origin in calls["aten::addmm"].origins] == [("aten::linear", "proj")]
    if provenance:
        (kernel,) = (call for op, call in calls.items() if op.startswith("cpp_fused"))
        assert kernel.origins[0].op == "aten::add_"
        assert {origin.op for origin in kernel.origins} >= {"aten::add_", "aten::sum"}
        assert kernel.origins[0].line is not None
        assert kernel.origins[0].line.line == line_of(Odd, "INPLACE")


def test_steps_know_what_they_were_made_from() -> None:
    _, program = lowered(Stack().forward, torch.randn(8, 12), ops=[attention], provenance=False)
    for step in program.steps:
        assert step.source is not None
        if step.is_captured:
            assert step.source.compiled is not None
            assert Path(step.source.compiled.file).read_text() == step.source.compiled.code
        else:
            assert step.source.compiled is None
            assert [op_name(node) for node in step.source.calls] == ["pgtest::attention"]
            assert launch_calls(step.source) == {}
    cuts = [step.source for step in program.steps if not step.is_captured and step.source]
    assert [origins_of(cut.calls[0])[0].module for cut in cuts] == ["layers.0", "layers.1", "layers.2"]


GLOBAL_MODEL = Stack()


def of_global(x: Tensor) -> Tensor:
    return GLOBAL_MODEL(x) + 1


@pytest.mark.parametrize(
    ("function", "prefix"),
    [
        (GLOBAL_MODEL.forward, ""),
        (of_global, "GLOBAL_MODEL."),
        ((lambda model: lambda x: model(x))(Stack()), ""),
    ],
)
def test_paths_begin_at_the_model(function: Any, prefix: str) -> None:
    traced = trace_it(function, torch.randn(8, 12), dynamic_dims={"x": 0})
    origins = [origins_of(node)[0] for node in traced.graph.nodes if node.op == "call_function"]
    paths = [origin.module for origin in origins if origin.op == "aten::linear"]
    assert paths == [f"{prefix}layers.{i}.{name}" for i in range(3) for name in ("up", "down")]
    assert all(origin.line is not None and origin.line.file == __file__ for origin in origins)


# --- a wrapper for a GPU, which no test can have generated

GPU_WRAPPER = """
triton_per_fused__to_copy__unsafe_view_add_mean_0 = async_compile.triton('triton_per_fused_0', 'text')
triton_tem_fused_mm_1 = async_compile.triton('triton_tem_fused_mm_1', 'text')

class Runner:
    def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((s27, 64), (64, 1), torch.bfloat16)
            # Topologically Sorted Source Nodes: [transpose, linear], Original ATen: [aten.transpose, aten.t, aten.mm]
            # [Provenance debug handles] extern_kernels.mm:1
            extern_kernels.mm(reinterpret_tensor(arg0_1, (s27, 64), (64, 1), 0),
                              arg1_1,
                              out=buf0)
            # Topologically Sorted Source Nodes: [linear, add, mean], Original ATen: [aten.view, aten.add, aten.mean]
            # [Provenance debug handles] triton_per_fused__to_copy__unsafe_view_add_mean_0:2
            triton_per_fused__to_copy__unsafe_view_add_mean_0_xnumel = 64*s27
            stream0 = get_raw_stream(0)
            triton_per_fused__to_copy__unsafe_view_add_mean_0.run(arg2_1, buf0, 64, stream=stream0)
            # Topologically Sorted Source Nodes: [mean, matmul, relu], Original ATen: [aten.mean, aten.mm, aten.relu]
            stream0 = get_raw_stream(0)
            triton_tem_fused_mm_1.run(arg2_1, buf0, stream=stream0)
            buf2 = torch.ops.aten.sort.stable(buf0, stable=False)
        return (buf0, )
"""


def gpu_piece() -> StepSource:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    turned = graph.call_method("transpose", (a, 0, 1))
    linear = graph.call_function(F.linear, (turned, b))
    added = graph.call_function(torch.add, (linear, a))
    mean = graph.call_function(torch.mean, (added,))
    product = graph.call_function(torch.matmul, (mean, b))
    graph.output((graph.call_function(torch.relu, (product,)),))
    provenance = '{"postToPre": {"mm": ["linear"]}, "cppCodeToPost": {"extern_kernels.mm:1": ["mm"]}}'
    compiled = CompiledSource("wrapper.py", GPU_WRAPPER, provenance)
    return StepSource(torch.fx.GraphModule(nn.Module(), graph), compiled)


def test_launches_of_a_wrapper_for_a_gpu() -> None:
    source = gpu_piece()
    assert source.compiled is not None
    first = next(i for i, text in enumerate(GPU_WRAPPER.splitlines(), 1) if "extern_kernels.mm(" in text)
    launches, calls = wrapper_launches(source.compiled), launch_calls(source)
    assert list(launches) == list(calls) == [first, first + 1, first + 2, first + 7, first + 10, first + 11]
    assert calls[first] is calls[first + 2]
    found = {call.op: [origin.op for origin in call.origins] for call in calls.values()}
    assert found == {
        "aten::mm": ["aten::linear"],
        "triton_per_fused__to_copy__unsafe_view_add_mean_0": ["aten::mean", "aten::add"],
        "triton_tem_fused_mm_1": ["aten::matmul", "aten::relu"],
        "aten::sort.stable": [],
    }
    assert launches[first].atens == ("aten::transpose", "aten::t", "aten::mm")


def test_names_that_the_graph_does_not_have_leave_the_lowered_ops() -> None:
    source = gpu_piece()
    source.module.graph.erase_node(next(iter(source.module.graph.find_nodes(op="output"))))
    for node in reversed(source.calls):
        source.module.graph.erase_node(node)
    calls = launch_calls(source)
    assert [origin.op for origin in next(iter(calls.values())).origins] == ["aten::transpose", "aten::t", "aten::mm"]
    assert {origin.module for call in calls.values() for origin in call.origins} == {""}
