"""The attention kernels on a GPU: every shape against the definition or the reference, and captured graphs over many
batches of their bucket.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from piecegraph.llm.kernels.attention import reference, triton_paged, varlen
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.skinny import Heads, plain_rotate
from piecegraph.llm.specs import Accepted, AttentionLayer, LatentLayer
from tests.cases.attention import (
    Problem,
    Sequences,
    assert_close,
    check,
    check_against,
    latent_layer,
    latent_problem,
    layer,
    problem,
    run,
    widened,
)

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"
HALF = torch.bfloat16
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TRITON = triton_paged.KERNEL

DECODE = Sequences(
    name="decode", spans=((1, 1), (1, 64), (1, 65), (1, 300), (1, 17)), padded_tokens=3, padded_seqs=3, max_seq_len=2048
)
MIXED = Sequences(
    name="mixed",
    spans=((70, 70), (1, 200), (33, 190), (1, 1), (5, 68), (16, 16)),
    padded_tokens=10,
    padded_seqs=2,
    max_seq_len=1024,
)
BATCHES = [DECODE, MIXED]
FEATURES = {
    "window": {"window": 50},
    "window of one": {"window": 1},
    "wide window": {"window": 1000},
    "chunk": {"chunk": 48},
    "softcap": {"softcap": 3.0},
    "sinks": {"has_sinks": True},
    "sinks, window": {"has_sinks": True, "window": 37},
    "softcap, window": {"softcap": 2.0, "window": 64},
    "narrow values": {"value_width": 64},
    "wide values": {"value_width": 256},
}
LATENTS = {
    "deepseek lite": latent_layer(16, latent=512, rope=64, nope=128, value=128),
    "deepseek": latent_layer(128, latent=512, rope=64, nope=128, value=128),
    "minicpm": latent_layer(40, latent=256, rope=32, nope=64, value=64),
}


@pytest.mark.parametrize("sequences", BATCHES, ids=lambda s: s.name)
@pytest.mark.parametrize("width", [8, 16, 32, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_sizes(dtype: torch.dtype, width: int, sequences: Sequences) -> None:
    check(TRITON, layer(4, 2, width), sequences, dtype, CUDA)


@pytest.mark.parametrize("sequences", BATCHES, ids=lambda s: s.name)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (14, 2), (16, 1), (71, 1), (160, 1)], ids=str)
def test_groups(heads: tuple[int, int], sequences: Sequences) -> None:
    check(TRITON, layer(*heads, 64), sequences, HALF, CUDA)


@pytest.mark.parametrize("sequences", BATCHES, ids=lambda s: s.name)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_features(dtype: torch.dtype, feature: str, sequences: Sequences) -> None:
    check(TRITON, layer(8, 2, 128, **FEATURES[feature]), sequences, dtype, CUDA)


@pytest.mark.parametrize("block_size", [1, 8, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("sequences", BATCHES, ids=lambda s: s.name)
@pytest.mark.parametrize("window", [0, 50])
def test_block_sizes(window: int, sequences: Sequences, block_size: int) -> None:
    changed = Sequences(
        name="",
        spans=sequences.spans,
        padded_tokens=sequences.padded_tokens,
        padded_seqs=sequences.padded_seqs,
        block_size=block_size,
        max_seq_len=512,
    )
    check(TRITON, layer(8, 2, 128, window=window), changed, HALF, CUDA)


@pytest.mark.parametrize("sequences", BATCHES, ids=lambda s: s.name)
@pytest.mark.parametrize("name", LATENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latent(dtype: torch.dtype, name: str, sequences: Sequences) -> None:
    check_against(TRITON, reference.KERNEL, LATENTS[name], sequences, dtype, CUDA)


@pytest.mark.parametrize("sequences", BATCHES, ids=lambda s: s.name)
def test_latent_against_the_expanded_form(sequences: Sequences) -> None:
    check(TRITON, latent_layer(4, latent=64, rope=16, nope=32, value=48), sequences, torch.float32, CUDA)


LARGE = [
    Sequences(name="one long prefill", spans=((2000, 2000),), padded_tokens=48),
    Sequences(name="prefill on a prefix", spans=((500, 4500), (500, 501), (1, 3000))),
    Sequences(name="many short", spans=tuple((1 + i % 40, 1 + i % 40 + i % 7 * 30) for i in range(150))),
    Sequences(
        name="decodes, then prompts",
        spans=(*((1, 20 + 50 * i) for i in range(60)), (300, 700), (1, 40), (130, 130)),
        padded_tokens=21,
        padded_seqs=3,
        max_seq_len=8192,
        max_prompts=32,
    ),
    Sequences(
        name="one decode beside a prompt",
        spans=((1, 7000), (600, 600)),
        padded_seqs=30,
        max_seq_len=8192,
        max_prompts=32,
    ),
    Sequences(
        name="long decodes",
        spans=((1, 16_001), (1, 300), (1, 9000), (1, 1)),
        padded_tokens=4,
        padded_seqs=4,
        max_seq_len=32768,
    ),
    Sequences(name="one long decode", spans=((1, 8000),), max_seq_len=32768),
    Sequences(name="many decodes", spans=tuple((1, 1 + 37 * i % 900) for i in range(100)), max_seq_len=4096),
    Sequences(name="nine decodes", spans=tuple((1, 500 + 300 * i) for i in range(9)), max_seq_len=4096),
]


@pytest.mark.parametrize("sequences", LARGE, ids=lambda s: s.name)
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (8, 4, 256), (9, 3, 64)], ids=str)
def test_large_batches(heads: tuple[int, int, int], sequences: Sequences) -> None:
    check_against(TRITON, reference.KERNEL, layer(*heads), sequences, HALF, CUDA)


@pytest.mark.parametrize("sequences", LARGE[-3:], ids=lambda s: s.name)
def test_large_latent_decodes(sequences: Sequences) -> None:
    check_against(TRITON, reference.KERNEL, LATENTS["deepseek lite"], sequences, HALF, CUDA)


@pytest.mark.parametrize("sequences", [*BATCHES, LARGE[0]], ids=lambda s: s.name)
@pytest.mark.parametrize("spec", [layer(8, 8, 64), layer(8, 2, 128), layer(8, 2, 128, window=50)], ids=["", "gqa", "w"])
def test_varlen(spec: AttentionLayer, sequences: Sequences) -> None:
    assert varlen.KERNEL.supports(spec, HALF, torch.device(CUDA)) == Accepted()
    check_against(varlen.KERNEL, reference.KERNEL, spec, sequences, HALF, CUDA)


@pytest.mark.parametrize("sequences", BATCHES, ids=lambda s: s.name)
def test_strided_inputs(sequences: Sequences) -> None:
    """q, k and v as slices of one fused projection."""
    case = problem(layer(8, 2, 64), sequences, HALF, CUDA)
    fused = torch.cat([case.arguments[name] for name in ("q", "k", "v")], 1)
    case.arguments.update(zip(("q", "k", "v"), fused.split([8, 2, 2], 1), strict=True))
    run(TRITON, case)
    assert_close(case.arguments["out"], case.expected, HALF)


@dataclass(frozen=True)
class Bucket:
    """What one captured graph serves."""

    name: str
    spec: AttentionLayer | LatentLayer
    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int = 600
    replays: int = 200
    block_size: int = 16
    decode_share: float = 0.0
    """How likely a sequence is to have one query; such come first, and are told apart."""

    def batch(self, chance: random.Random) -> Sequences:
        """Any batch that fits."""
        spans: list[tuple[int, int]] = []
        left = self.num_tokens
        for _ in range(chance.randint(1, self.num_seqs)):
            if left == 0:
                break
            count = 1 if chance.random() < self.decode_share else chance.randint(1, min(left, self.max_query_len))
            spans.append((count, chance.randint(count, max(count, chance.choice([count + 3, 130, self.max_seq_len])))))
            left -= count
        if self.decode_share:
            spans.sort(key=lambda span: span[0] > 1)
        return Sequences(
            name=self.name,
            spans=tuple((count, max(count, length)) for count, length in spans),
            padded_tokens=left,
            padded_seqs=self.num_seqs - len(spans),
            block_size=self.block_size,
            max_prompts=self.num_seqs if self.decode_share else 0,
            max_seq_len=self.max_seq_len,
            query_bound=self.max_query_len,
        )

    def problem(self, sequences: Sequences, seed: int) -> Problem:
        make = latent_problem if isinstance(self.spec, LatentLayer) else problem
        return make(self.spec, sequences, HALF, CUDA, seed=seed, defined=False)  # type: ignore[operator]


BUCKETS = [
    Bucket("decode of one", layer(16, 8, 128), 1, 1, 1),
    Bucket("decode", layer(16, 8, 128), 8, 8, 1),
    Bucket("decode, sinks and window", layer(8, 2, 64, has_sinks=True, window=100), 5, 5, 1),
    Bucket("large decode", layer(16, 8, 128), 64, 64, 1, replays=20),
    Bucket("mixed", layer(16, 8, 128), 128, 6, 100),
    Bucket("mixed, softcap and window", layer(8, 2, 64, softcap=3.0, window=100), 128, 6, 100),
    Bucket("under load", layer(16, 8, 128), 256, 70, 200, decode_share=0.9, replays=40),
    Bucket("latent under load", LATENTS["deepseek lite"], 128, 30, 50, decode_share=0.8, replays=20),
    Bucket("latent decode", LATENTS["deepseek lite"], 4, 4, 1, replays=60),
    Bucket("latent mixed", LATENTS["deepseek lite"], 64, 4, 50, replays=60),
]


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: bucket.name)
def test_one_captured_graph_serves_every_batch_of_its_bucket(bucket: Bucket) -> None:
    check_replays(bucket, TRITON)


def check_replays(bucket: Bucket, kernel: AttentionKernel, *, may_clear: bool = False) -> None:
    chance = random.Random(0)
    static = bucket.problem(bucket.batch(chance), 0)
    graph = captured(kernel, static, bucket.spec)
    for seed, sequences in enumerate(batches(bucket, chance)):
        fresh = bucket.problem(sequences, seed)
        copy_into(static, fresh)
        graph.replay()
        wide = widened(fresh)
        run(reference.KERNEL, wide)
        assert_close(static.arguments["out"], wide.arguments["out"].double(), HALF)
        check_cache(static, wide, may_clear=may_clear)


def batches(bucket: Bucket, chance: random.Random) -> Iterator[Sequences]:
    for _ in range(bucket.replays):
        yield bucket.batch(chance)


def captured(kernel: AttentionKernel, case: Problem, spec: AttentionLayer | LatentLayer) -> torch.cuda.CUDAGraph:
    assert kernel.prepare is not None
    kernel.prepare([spec], torch.device(CUDA))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(kernel, case)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(kernel, case)
    return graph


def copy_into(static: Problem, fresh: Problem) -> None:
    """Everything but the weights' and buffers' addresses is new: poison, caches, tables."""
    for name, value in fresh.arguments.items():
        if isinstance(value, torch.Tensor):
            static.arguments[name].copy_(value)
    for name in ("query_starts", "seq_lens", "block_table", "slots"):
        getattr(static.batch, name).copy_(getattr(fresh.batch, name))
    if static.batch.prompts is not None:
        for name in ("starts", "lens", "table"):
            getattr(static.batch.prompts, name).copy_(getattr(fresh.batch.prompts, name))


def check_cache(static: Problem, wide: Problem, *, may_clear: bool) -> None:
    """Real tokens are written where the reference wrote them. Elsewhere nothing is written but block 0, and zeros if
    that is allowed.
    """
    for name in ("key_cache", "value_cache", "cache"):
        if name in static.arguments:
            found, expected = static.arguments[name][1:].float(), wide.arguments[name][1:]
            if may_clear:
                found = torch.where(expected.isnan() & (found == 0), expected, found)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_batch_of_padding_alone() -> None:
    for bucket in BUCKETS:
        case = bucket.problem(bucket.batch(random.Random(1)), 1)
        for buffer in (case.batch.query_starts, case.batch.seq_lens, case.batch.slots):
            buffer.zero_()
        if case.batch.prompts is not None:
            case.batch.prompts.starts.zero_()
            case.batch.prompts.lens.zero_()
        run(TRITON, case)
        assert torch.equal(case.arguments["out"], torch.zeros_like(case.arguments["out"]))


FEW = Sequences(name="few", spans=((9, 9), (1, 200), (5, 68)), padded_tokens=1, padded_seqs=1, max_seq_len=1024)
UNDER_LOAD = Sequences(
    name="under load",
    spans=((1, 300), (1, 17), (1, 1), (70, 70), (33, 190)),
    padded_tokens=10,
    padded_seqs=2,
    max_seq_len=1024,
    max_prompts=4,
)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("sequences", [FEW, MIXED, UNDER_LOAD], ids=lambda sequences: sequences.name)
def test_heads_are_turned_on_their_way_to_the_cache(sequences: Sequences, has_norm: bool, width: int) -> None:
    """By the kernels for prompts and for decoding, as by plain torch before them."""
    case = problem(layer(8, 2, width), sequences, HALF, CUDA, defined=False)
    arguments, expected = case.arguments, widened(case).arguments
    rows = [arguments.pop(name).flatten(1) for name in ("q", "k", "v")]
    parts = torch.cat(rows, -1)[None].split([part.shape[1] for part in rows], -1)
    chance = torch.Generator(CUDA).manual_seed(width)
    turn, gains = (
        torch.randn(2, size, width, generator=chance, device=CUDA, dtype=HALF) for size in (rows[0].shape[0], 1)
    )
    heads = Heads(*turn[:, None], *(gains.flatten(1) if has_norm else (None, None)), 1e-6)
    wide = [None if part is None else part.float() for part in (heads.cos, heads.sin, heads.q_gain, heads.k_gain)]
    turned = plain_rotate(*(part.float() for part in parts), Heads(*wide, 1e-6))  # type: ignore[arg-type]
    reference.KERNEL.attend(**{**expected, **dict(zip("qkv", turned, strict=True))})
    triton_paged.attend_turned(*parts, heads, **arguments)
    for name in ("out", "key_cache", "value_cache"):
        found, wanted = arguments[name].float(), expected[name].float()
        # Turns that are no rotations make large scores: rounding of one of them may move a weight by some percent.
        torch.testing.assert_close(found, wanted, rtol=6e-2, atol=6e-2, equal_nan=True)
