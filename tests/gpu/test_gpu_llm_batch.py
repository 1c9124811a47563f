"""The buffers and the sampler of a language model on a GPU: the same as on a CPU, and captured once for every batch."""

from __future__ import annotations

import pytest
import torch

from piecegraph.base import torch_compat
from piecegraph.llm.kernels.race import launch_weights
from piecegraph.llm.kernels.truncate import launch_truncate, truncate
from piecegraph.llm.run.batch import BatchBuffers
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling import SamplingMode, sample
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.step import Bucket
from tests.cases.fake_llm import CacheGroup, FakeLLM

pytestmark = pytest.mark.gpu


def test_a_gpu_holds_what_a_cpu_holds_step_by_step() -> None:
    groups = [CacheGroup(num_blocks=12), CacheGroup(num_blocks=12, window=5)]
    llm = FakeLLM(groups, block_size=4, max_num_seqs=3, max_batch_tokens=8)
    gpu = BatchBuffers(llm.buffers.limits, "cuda")
    for i in range(6):
        params = SamplingParams(max_new_tokens=9, temperature=i % 2, ignore_eos=True)
        llm.scheduler.add(Request(str(i), range(1, 8 + i), params))
    while (plan := llm.scheduler.schedule()) is not None:
        num_tokens = 4 if plan.kind == "decode" else 10
        bucket = Bucket(num_tokens, 4, plan.kind)
        gpu.fill_dummy(bucket)  # what it leaves must not be seen, nor may it be overtaken
        gpu.fill(plan, bucket)
        tokens = llm.forward(plan, bucket)
        ours, theirs = gpu.views(bucket), llm.buffers.views(bucket)
        for name in ("input_ids", "positions", "query_starts", "seq_lens", "state_slots", "logit_rows", "temperature"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
        for mine, their in zip(ours.attention, theirs.attention, strict=True):
            assert mine.slots.tolist() == their.slots.tolist()
            assert mine.block_table.tolist() == their.block_table.tolist()
        assert ours.random_keys.tolist() == theirs.random_keys.tolist()
        llm.scheduler.commit(plan, tokens[: plan.num_seqs])


def test_a_stream_that_is_entered_is_the_current_one() -> None:
    own, before = torch.cuda.Stream(), torch.cuda.current_stream()
    assert torch_compat.current_stream(before.device_index) == before
    with torch_compat.OnStream(own):
        assert torch.cuda.current_stream() == torch_compat.current_stream(own.device_index) == own
    assert torch.cuda.current_stream() == before


@pytest.mark.parametrize("mode", ["greedy", "plain", "truncated"])
def test_a_captured_sampler_serves_every_batch(mode: SamplingMode) -> None:
    rows, vocab_size = 8, 50_000
    logits = torch.zeros(rows, vocab_size, device="cuda")
    keys = torch.zeros(rows, dtype=torch.int64, device="cuda")
    temperature = torch.ones(rows, device="cuda")
    top_k = torch.zeros(rows, dtype=torch.int64, device="cuda")
    top_p = torch.ones(rows, device="cuda")
    inputs = (logits, temperature, top_k, top_p, keys)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sample(*inputs, mode=mode)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(*inputs, mode=mode)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        # Apart by more than rounding, so that both devices agree on every token.
        for row in range(rows):
            logits[row] = torch.randperm(vocab_size, generator=generator) / vocab_size * 30
        logits[3, 17] = float("nan")
        keys.copy_(torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator))
        temperature.copy_(torch.where(torch.arange(rows) % 3 == 0, 0.0, 0.01))
        if mode == "truncated":
            top_k.copy_(torch.arange(rows) * 3)
            top_p[5] = 0.4
        graph.replay()
        expected = sample(*(each.cpu() for each in inputs), mode=mode)
        assert tokens.tolist() == expected.tolist()
        assert tokens[3].item() == -1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 70])
def test_truncated_weights_are_those_of_sorted_ones(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (3 * torch.randn(rows, 50_257, device="cuda", generator=generator)).to(dtype)
    best, numbers = logits.argmax(-1), torch.arange(rows, device="cuda")
    top_k, top_p = (numbers % 4) * 17, 1 - (numbers % 3) * 0.3
    min_p = (numbers % 5 == 0) * 0.01
    weights = launch_weights(logits, best, torch.full((rows,), 0.7, device="cuda"))
    scaled = weights.log()
    expected = truncate(scaled, weights, top_k, top_p, min_p) > 0
    launch_truncate(logits, weights, top_k, top_p, min_p)
    # Sums that are made in another order may differ about the last token.
    assert ((weights > 0) != expected).sum(-1).max() <= 1
