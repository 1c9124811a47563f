"""Traces of kernels whose truth is known: two layers of a language model, and what else runs beside them."""

from __future__ import annotations

from dataclasses import replace

from piecegraph.base.origin import LaunchCall, Origin, WorkKind
from piecegraph.base.plan import SourceLine
from piecegraph.provenance.launch import How, KernelProfile, Launch

FILE = "/site-packages/transformers/models/llama/modeling_llama.py"
GEMM = "nvjet_sm90_tst_64x16_64x16_2x1_v_bz_splitK_TNT"
REDUCE = "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams<float>)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
FUSED = "triton_poi_fused_mul_silu_0"


def origin(op: str, module: str, *lines: int) -> Origin:
    return Origin(op, module, tuple(SourceLine(FILE, line, f"line {line}") for line in lines))


def launch(
    name: str,
    start: float,
    duration: float,
    call: LaunchCall | None = None,
    *,
    kind: WorkKind = "kernel",
    stream: str = "7",
    instance: int = -1,
    phase: str = "decode 16",
    how: How = "position",
    replay: int = -1,
) -> Launch:
    return Launch(kind, name, start, duration, stream, (64, 1, 4), (128, 1, 1), call, instance, phase, how, replay)


def layer(number: int, start: float) -> list[Launch]:
    """A split GEMM of two projections, and a fused kernel: 30 us in all, without a gap."""
    path = f"model.layers.{number}"
    query = LaunchCall(
        "aten::mm", (origin("aten::linear", f"{path}.self_attn.q_proj", 400, 250),), ("bfloat16[16, 64]",)
    )
    up = LaunchCall("aten::mm", (origin("aten::linear", f"{path}.mlp.up_proj", 400, 180),), ("bfloat16[16, 64]",))
    silu = origin("aten::silu", f"{path}.mlp.act_fn", 400, 180)
    fused = LaunchCall(FUSED, (silu, origin("aten::mul", f"{path}.mlp", 400, 180), origin("aten::add", path, 405)))
    return [
        launch("Memset (Device)", start, 1, query, kind="memset", instance=10 * number),
        launch(GEMM, start + 1, 7, query, instance=10 * number),
        launch(REDUCE, start + 8, 2, query, instance=10 * number),
        launch(GEMM, start + 10, 13, up, instance=10 * number + 1),
        launch(REDUCE, start + 23, 2, up, instance=10 * number + 1),
        launch(FUSED, start + 25, 5, fused, instance=10 * number + 2),
    ]


def decode_trace() -> KernelProfile:
    """80 us of work in a span of 100 us: two layers, an eager add that overlaps the second, and a copy nobody knows."""
    eager = LaunchCall("aten::add", (origin("aten::add", "", 900),), ("float32[16]", "float32[16]"))
    others = [
        launch(ADD, 45, 10, eager, stream="13", instance=77, phase="", how="call"),
        launch("Memcpy DtoH (Device -> Pageable)", 90, 10, kind="memcpy", phase="", how="none"),
    ]
    return KernelProfile((*layer(0, 0), *layer(1, 30), *others), device="NVIDIA H200", notes=("a note",))


GROUPS = {0: "1", 10: "1", 1: "1", 11: "1"}
"""The calls of ``aten::mm``."""


def slower(trace: KernelProfile, factor: float) -> KernelProfile:
    return replace(trace, launches=tuple(replace(one, duration=one.duration * factor) for one in trace.launches))
