"""Which line launched this kernel, on a GPU: inside graphs, and against a truth found in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import piecegraph
from piecegraph.provenance.groups.group import Group, Groups
from piecegraph.provenance.launch import Launch
from piecegraph.provenance.names import family
from tests.cases.attribution import (
    SPLITTING_OPS,
    WeightReaders,
    graph_records,
    make_decoder,
    matmul_modules,
    share_known,
)
from tests.cases.tiny_llm import write_tiny_llm

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
NUM_TOKENS = 64


def compiled(model: torch.nn.Module, **arguments: Any) -> Any:
    options = {"provenance": True, **arguments.pop("options", {})}
    return piecegraph.compile(
        model, splitting_ops=SPLITTING_OPS, on_fallback="raise", options=options, dynamic_dims={}, **arguments
    )


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("size", ["tiny", "1b"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_node_has_its_call_and_every_call_its_layer(family: str, size: str, backend: str) -> None:
    model = make_decoder(family, size, CUDA, torch.bfloat16)
    ids = torch.randint(0, 256, (1, NUM_TOKENS), device=CUDA)
    fast = compiled(model, backend=backend)
    truth = WeightReaders(model, torch.cuda.is_current_stream_capturing)
    with torch.no_grad():
        with truth:
            fast.capture(ids)
        records = graph_records(fast._engine.recorded.tapes())
        assert all(node.call is not None for record in records for node in record.nodes)
        assert truth.modules
        assert list(matmul_modules(records, truth.names.values())) == truth.modules
        with piecegraph.trace() as t:
            for _ in range(3):
                fast(ids)
    replayed = [launch for launch in t.launches if launch.how in ("position", "node id", "step")]
    assert {launch.how for launch in replayed} <= {"position", "node id"}, t.notes
    assert len(replayed) == 3 * sum(len(record.nodes) for record in records)
    assert share_known(replayed) >= 0.99
    between = [launch for launch in t.launches if launch.call is not None and launch.call.op in SPLITTING_OPS]
    assert share_known(between) == 1.0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eager_code(family: str) -> None:
    model = make_decoder(family, "tiny", CUDA, torch.bfloat16)
    ids = torch.randint(0, 256, (1, NUM_TOKENS), device=CUDA)
    with torch.no_grad():
        model(ids)
        with piecegraph.trace() as t:
            model(ids)
    assert {launch.how for launch in t.launches} == {"call"}
    in_layers = [launch for launch in t.launches if launch.call is not None and launch.call.op in ("aten::mm",)]
    shapes = {launch.call.origins[0].module: launch.call.shapes for launch in in_layers if launch.call is not None}
    for number, layer in enumerate(model.model.layers):
        rows = layer.self_attn.q_proj.weight.shape[0]
        assert f"bfloat16[64, {rows}]" in shapes[f"model.layers.{number}.self_attn.q_proj"]
    assert share_known([launch for launch in t.launches if launch.call.origins[0].module]) == 1.0  # type: ignore[union-attr]


def test_code_that_torch_compiled() -> None:
    """Its kernels are no ops; the line is the one that calls it."""
    x = torch.randn(64, 64, device=CUDA)
    compiled_sin = torch.compile(lambda t: (t.sin() + 1) @ t)
    compiled_sin(x)
    with piecegraph.trace() as t:
        compiled_sin(x)  # here
    assert any(launch.name.startswith("triton_") for launch in t.launches)
    assert {launch.how for launch in t.launches} == {"call"}
    for launch in t.launches:
        assert launch.call is not None
        assert "# here" in [line.text.rpartition("  ")[2] for line in launch.call.origins[0].stack]


def group_of(groups: Groups, member: str) -> Group:
    return next(group for group in groups.groups if any(member in one.name for one in group.members))


def sweep_of_linears(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (torch.randn(m, k, device=CUDA, dtype=dtype), torch.randn(n, k, device=CUDA, dtype=dtype))
        for m in (1, 16, 64, 512, 2048)
        for k in (512, 4096, 8192)
        for n in (512, 4096)
    ]


def test_the_kernels_of_one_call_are_a_group() -> None:
    q = torch.randn(2, 8, 512, 64, device=CUDA, dtype=torch.bfloat16)
    sweep = sweep_of_linears(torch.bfloat16)
    numbers = torch.rand(1 << 22, device=CUDA)

    def work() -> None:
        for x, weight in sweep:
            F.linear(x, weight)
        numbers.cumsum(0)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)

    work()
    with piecegraph.trace() as t:
        for _ in range(6):
            work()
    split = group_of(t.groups(), "splitKreduce_kernel")
    assert (split.op, split.verdict) == ("aten::mm", "always")
    assert ["splitK" in split.members[0].name, "splitKreduce" in split.members[1].name] == [True, True]
    assert 0 < split.support < 6 * len(sweep)  # not every matmul is split
    scan = group_of(t.groups(), "DeviceScanKernel")
    assert (scan.op, scan.verdict) == ("aten::cumsum", "always")
    assert ["DeviceScanInitKernel" in scan.members[0].name, "DeviceScanKernel" in scan.members[1].name] == [True, True]
    attention = [launch for launch in t.launches if launch.call is not None and "attention" in launch.call.op]
    assert len({launch.instance for launch in attention}) == 6


def test_claims_about_gemms_whose_names_do_not_tell() -> None:
    """Kernels for float32 have one name, split or not. Every claim is looked up in the launches."""
    sweep = sweep_of_linears(torch.float32)
    with piecegraph.trace() as t:
        for _ in range(6):
            for x, weight in sweep:
                F.linear(x, weight)
    calls: dict[int, list[Launch]] = {}
    for launch in t.launches:
        if launch.call is not None and launch.call.op == "aten::mm":
            calls.setdefault(launch.instance, []).append(launch)
    split = group_of(t.groups(), "gemm_f32f32_f32f32_f32_splitK")
    assert (split.op, split.verdict) == ("aten::mm", "always given")
    company = [member.name for member in split.members if member.name != split.anchor and not member.is_optional]
    for launches in calls.values():
        families = [family(launch.name) for launch in launches]
        if split.anchor in families:
            assert all(name in families for name in company)
            assert all(launch.grid[2] > 1 for launch in launches if family(launch.name) in company)  # type: ignore[index]
    # A GEMM that adds up in place is as deep, but alone: the depth of the grid is no condition, and not claimed as one.
    assert all(member.condition is None for member in split.members if member.name in company)


class Add(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_disabled_kernel_leaves_its_output_alone(backend: str, tmp_path: Path) -> None:
    model = Add().to(CUDA).eval()
    x = torch.randn(32, 64, device=CUDA)
    fast = compiled(model, backend=backend)
    with torch.no_grad():
        expected = fast(x)
        (tape,) = fast._engine.recorded.tapes()
        chosen = fast.kernels.select(op="aten::add")
        memory = tape._outputs[0]
        for _ in range(1000):
            memory.fill_(7.0)
            with chosen.disable():
                assert torch.equal(fast(x), torch.full_like(expected, 7.0))
            assert torch.equal(fast(x), expected)
        (cost,) = chosen.time()
        assert cost.with_us > 0
        paths = chosen.dump(tmp_path)
    saved = torch.load(paths[0], weights_only=False)
    assert torch.equal(saved["outputs"].to(CUDA), expected)


def test_a_language_model_without_a_part_of_it(tmp_path: Path) -> None:
    """Kernels of whole steps are attributed, left out and let in again; what the model says stays the same."""
    path = write_tiny_llm(tmp_path)
    options = {"provenance": True, "progress": False}
    with piecegraph.LLM(path, backend="eager", max_num_seqs=2, max_batch_tokens=32, options=options) as llm:
        expected = llm.generate([[1, 2, 3, 4, 5]], max_new_tokens=6, ignore_eos=True)[0].token_ids
        with piecegraph.trace() as t:
            llm.generate([[1, 2, 3, 4, 5]], max_new_tokens=6, ignore_eos=True)
        replayed = [launch for launch in t.launches if launch.how in ("position", "node id", "step")]
        assert replayed
        assert {launch.how for launch in replayed} <= {"position", "node id"}, t.notes
        assert all(launch.call is not None for launch in replayed)
        for part in ("mlp", "self_attn", "lm_head"):
            chosen = llm.kernels.select(module=part)
            assert all(cost.with_us > 0 for cost in chosen.time(rounds=3))
            with chosen.disable():
                pass
        assert llm.generate([[1, 2, 3, 4, 5]], max_new_tokens=6, ignore_eos=True)[0].token_ids == expected
