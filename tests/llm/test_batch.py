"""A step's numbers in static buffers: right for every field, and nothing of the step before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from piecegraph.llm.cache.block_tables import BlockTables
from piecegraph.llm.cache.paged import SequenceBlocks
from piecegraph.llm.kernels.race import random_keys
from piecegraph.llm.run.batch import BatchBuffers, BatchLimits
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling import HOTTEST
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.step import Bucket, StepPlan, Work

BLOCK_SIZE = 4


def make(**options: object) -> BatchBuffers:
    sizes = {"max_tokens": 16, "max_seqs": 6, "max_model_len": 32, "block_size": BLOCK_SIZE}
    defaults = {**sizes, "num_groups": 2, "vocab_size": 8}
    return BatchBuffers(BatchLimits(**{**defaults, **options}), "cpu")  # type: ignore[arg-type]


def work(start: int, num_tokens: int, first_block: int, **options: object) -> Work:
    """A request whose tokens are 100, 101, ... and whose blocks are numbered from ``first_block`` on, tens of it in
    the second group."""
    params = options.pop("params", SamplingParams())
    request = Request("r", range(100, 100 + start + num_tokens), params, **options)  # type: ignore[arg-type]
    request.blocks = SequenceBlocks(2)
    num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
    numbers = list(range(first_block, first_block + num_blocks))
    request.blocks.tables = [numbers, [10 * number for number in numbers]]
    request.state_slot = first_block
    return Work(request, start, num_tokens, True)


def plan(*works: Work, kind: str = "mixed") -> StepPlan:
    return StepPlan(works, sum(each.num_tokens for each in works), kind)  # type: ignore[arg-type]


def fields(buffers: BatchBuffers, bucket: Bucket) -> dict[str, list[object]]:
    views = buffers.views(bucket)
    names = "input_ids positions query_starts seq_lens state_slots logit_rows temperature top_k top_p random_keys"
    found = {name: getattr(views, name).tolist() for name in names.split()}
    for g, batch in enumerate(views.attention):
        found |= {f"slots {g}": batch.slots.tolist(), f"table {g}": batch.block_table.tolist()}
    return found


def test_the_size_of_the_buffers_is_known_before_they_are_made() -> None:
    limits = make(embed_width=8, has_mrope=True).limits
    per_token, per_seq = 8 + 8 + 2 * 8 + 3 * 8 + 1 + 8 * 2, 4 + 8 + 8 + 4 + 4 + 8 + 4 + 8 + 8 + 8 + 4
    of_prompts = 4 + 32 * (4 + 4 + 8)
    assert limits.num_bytes == 16 * per_token + 6 * per_seq + 4 + of_prompts + 2 * (6 + 32) * 8 * 4


def test_a_mixed_step_padded() -> None:
    buffers, bucket = make(), Bucket(8, 4)
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=3, seed=11)
    buffers.fill(plan(work(5, 1, 1), work(2, 4, 5, params=params)), bucket)
    found = fields(buffers, bucket)
    assert found["input_ids"] == [105, 102, 103, 104, 105, 0, 0, 0]
    assert found["positions"] == [5, 2, 3, 4, 5, 0, 0, 0]
    assert found["slots 0"] == [2 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 6 * 4, 6 * 4 + 1, 0, 0, 0]
    assert found["slots 1"] == [20 * 4 + 1, 50 * 4 + 2, 50 * 4 + 3, 60 * 4, 60 * 4 + 1, 0, 0, 0]
    assert found["query_starts"] == [0, 1, 5, 5, 5]
    assert found["seq_lens"] == [6, 6, 0, 0]
    assert found["logit_rows"] == [0, 4, 0, 0]
    assert found["state_slots"] == [1, 5, 0, 0]
    assert found["table 0"] == [[1, 2] + [0] * 6, [5, 6] + [0] * 6, [0] * 8, [0] * 8]
    assert found["table 1"] == [[10, 20] + [0] * 6, [50, 60] + [0] * 6, [0] * 8, [0] * 8]
    assert found["temperature"] == [0, 0.5, 0, 0]
    assert found["top_p"] == pytest.approx([1, 0.9, 1, 1])
    assert found["top_k"] == [0, 3, 0, 0]
    assert found["random_keys"][1] == random_keys(np.array([11], np.uint64), np.array([6]))[0]
    assert buffers.sampling_mode == "truncated"


def test_prompts_are_told_apart_where_there_may_be_many_sequences() -> None:
    buffers, bucket = make(max_tokens=64, max_seqs=40), Bucket(48, 40, separates_prompts=True)
    buffers.fill(plan(work(5, 1, 1), work(6, 1, 5), work(2, 4, 9), work(3, 1, 20)), bucket)
    for group, batch in enumerate(buffers.views(bucket).attention):
        rows = batch.prompts
        assert rows is not None
        assert rows.starts.tolist() == [2, 6, 7] + [7] * 30
        assert rows.lens.tolist() == [6, 4] + [0] * 30
        assert torch.equal(rows.table[:2], batch.block_table[2:4])
        assert rows.table[0, 0] == 9 * 10**group
    assert buffers.views(Bucket(16, 4)).attention[0].prompts is None


@pytest.mark.parametrize("temperature", [1e300, 10**30])
def test_a_temperature_stays_finite_on_the_device(temperature: float) -> None:
    buffers, bucket = make(), Bucket(1, 1, "decode")
    buffers.fill(plan(work(5, 1, 1, params=SamplingParams(temperature=temperature)), kind="decode"), bucket)
    assert fields(buffers, bucket)["temperature"] == pytest.approx([min(temperature, HOTTEST)])


def test_a_decode_step_padded() -> None:
    buffers, bucket = make(), Bucket(4, 4, "decode")
    buffers.fill(plan(work(5, 1, 1), work(8, 1, 5), kind="decode"), bucket)
    found = fields(buffers, bucket)
    assert found["input_ids"] == [105, 108, 0, 0]
    assert found["slots 0"] == [9, 28, 0, 0]
    assert found["query_starts"] == [0, 1, 2, 2, 2]
    assert found["seq_lens"] == [6, 9, 0, 0]
    assert found["logit_rows"] == [0, 1, 0, 0]
    assert buffers.sampling_mode == "greedy"


def test_the_numbers_of_a_bucket_are_upper_bounds() -> None:
    buffers = make()
    decode, mixed = (buffers.views(bucket).attention[1] for bucket in (Bucket(4, 4, "decode"), Bucket(16, 2)))
    assert (decode.max_query_len, decode.max_seq_len, decode.block_size) == (1, 32, BLOCK_SIZE)
    assert (mixed.max_query_len, tuple(mixed.block_table.shape), mixed.slots.shape[0]) == (16, (2, 8), 16)


@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_nothing_is_left_of_the_step_before(kind: str) -> None:
    """Whatever lies in the buffers, the bucket holds what it would hold in fresh ones."""
    used, fresh = make(), make()
    large = plan(
        *(work(6, 1, 1 + 3 * i, params=SamplingParams(temperature=1, top_k=2)) for i in range(6)), kind="decode"
    )
    used.fill(large, Bucket(6, 6, "decode"))
    used._staging.fill_(0x5A)
    used._buffer.fill_(0x5A)
    used._rows = []  # what the host remembers having written is gone as well
    bucket = Bucket(5, 5, kind)  # type: ignore[arg-type]
    step = plan(work(3, 1, 2), work(7, 1, 4), kind=kind)
    used.fill(step, bucket)
    fresh.fill(step, bucket)
    assert fields(used, bucket) == fields(fresh, bucket)


def test_addresses_never_change() -> None:
    buffers, bucket = make(), Bucket(4, 4, "decode")
    before = buffers.views(bucket)
    buffers.fill_dummy(bucket)
    buffers.fill(plan(work(5, 1, 1), kind="decode"), bucket)
    assert buffers.views(bucket) is before
    assert buffers.views(Bucket(8, 4)).input_ids.data_ptr() == before.input_ids.data_ptr()


def test_tokens_of_dummies_differ() -> None:
    buffers, mixed, decode = make(vocab_size=10), Bucket(16, 2), Bucket(4, 4, "decode")
    buffers.fill_dummy(mixed)
    assert buffers.views(mixed).input_ids.tolist() == [*range(8), *range(1, 9)]
    buffers.fill_dummy(decode, context=8)
    assert buffers.views(decode).input_ids.tolist() == [8, 9, 0, 1]


@pytest.mark.parametrize("bucket", [Bucket(4, 4, "decode"), Bucket(16, 3), Bucket(2, 6), Bucket(16, 1)])
@pytest.mark.parametrize("context", [0, 7, 1000])
def test_a_dummy_touches_block_0_alone(bucket: Bucket, context: int) -> None:
    buffers = make()
    buffers.fill(plan(work(5, 1, 1), work(2, 4, 5)), Bucket(8, 4))
    buffers.fill_dummy(bucket, context=context)
    views = buffers.views(bucket)
    for batch in views.attention:
        assert not batch.block_table.any()
        assert int(batch.slots.max()) < BLOCK_SIZE
    lengths = views.seq_lens.tolist()
    num_queries = views.query_starts.diff().tolist()
    assert all(0 <= queries <= length <= 32 for queries, length in zip(num_queries, lengths, strict=True))
    if bucket.kind == "decode":
        assert num_queries == [1] * 4
    else:
        assert sum(num_queries) > 0


def test_a_dummy_in_several_blocks_keeps_its_tokens_apart() -> None:
    buffers, bucket = make(), Bucket(14, 1)
    buffers.fill_dummy(bucket, num_blocks=4)
    for batch in buffers.views(bucket).attention:
        assert batch.slots.tolist() == list(range(14))
        assert batch.block_table.tolist() == [[0, 1, 2, 3, 0, 0, 0, 0]]


def test_only_what_changed_in_a_table_is_sent() -> None:
    buffers, bucket = make(), Bucket(2, 2, "decode")
    works = [work(7, 1, 1), work(3, 1, 5)]
    buffers.fill(plan(*works, kind="decode"), bucket)
    buffers.tables.device.fill_(-1)
    works[0].request.tokens.append(1)
    blocks = works[0].request.blocks
    assert blocks is not None
    for table, block in zip(blocks.tables, (9, 90), strict=True):
        table.append(block)
    blocks.version += 1
    buffers.fill(plan(Work(works[0].request, 8, 1, True), works[1], kind="decode"), bucket)
    expected = np.full((2, 6, 8), -1)
    expected[0, 0, 2], expected[1, 0, 2] = 9, 90
    assert (buffers.tables.device.numpy() == expected).all()


def test_blocks_given_back_become_0_and_a_row_that_left_is_cleared() -> None:
    tables = BlockTables(1, 3, 8, torch.device("cpu"))
    one, two = SequenceBlocks(1), SequenceBlocks(1)
    one.tables, two.tables = [[1, 2, 3, 4]], [[5, 6]]
    tables.place_all([one, two])
    one.tables, one.num_returned, one.version = [[0, 0, 3, 4, 7]], [2], 1
    tables.place_all([one])
    tables.send()
    tables.use_sent()
    assert tables.device[0].tolist() == [[0, 0, 3, 4, 7, 0, 0, 0], [0] * 8, [0] * 8]


def test_many_changes_are_sent_at_once() -> None:
    tables = BlockTables(2, 3, 8, torch.device("cpu"), max_edits=5)
    blocks = SequenceBlocks(2)
    blocks.tables = [[1, 2, 3], [4, 5, 6]]
    tables.place_all([blocks])
    tables.send()
    tables.use_sent()
    assert tables.device[:, 0, :4].tolist() == [[1, 2, 3, 0], [4, 5, 6, 0]]
    assert (tables.device.numpy() == tables.mirror).all()


def test_embeddings_and_positions_of_the_request_s_own() -> None:
    buffers = make(has_mrope=True, embed_width=3, embed_dtype=torch.float32)
    embeds = torch.arange(18.0).view(6, 3)
    mrope = np.array([[0, 1, 1, 1, 2, 3], [0, 1, 2, 3, 2, 3], [0, 1, 1, 1, 2, 3]])
    own = work(2, 4, 1, input_embeds=embeds, mrope_positions=mrope)
    own.request.tokens.append(9)  # the first generated one
    bucket = Bucket(8, 3)
    buffers.fill(plan(own, work(1, 2, 5)), bucket)
    views = buffers.views(bucket)
    assert views.has_embeds is not None
    assert views.input_embeds is not None
    assert views.mrope_positions is not None
    assert views.has_embeds.tolist() == [True] * 4 + [False] * 4
    assert torch.equal(views.input_embeds[:4], embeds[2:])
    assert views.mrope_positions.tolist() == [
        [1, 1, 2, 3, 1, 2, 0, 0],
        [2, 3, 2, 3, 1, 2, 0, 0],
        [1, 1, 2, 3, 1, 2, 0, 0],
    ]
    own.request.blocks.tables = [[1, 2], [10, 20]]  # type: ignore[union-attr]
    buffers.fill(plan(Work(own.request, 6, 1, True), kind="decode"), Bucket(1, 1, "decode"))
    views = buffers.views(Bucket(1, 1, "decode"))
    assert views.has_embeds is not None
    assert views.mrope_positions is not None
    assert (views.has_embeds.tolist(), views.mrope_positions.tolist()) == ([False], [[4], [4], [4]])


def test_a_step_that_does_not_fit_its_bucket_is_our_own_bug() -> None:
    buffers = make()
    for bucket in (Bucket(4, 4), Bucket(8, 1), Bucket(8, 8, "decode"), Bucket(99, 2)):
        with pytest.raises(AssertionError):
            buffers.fill(plan(work(5, 1, 1), work(2, 4, 5)), bucket)


def test_tokens_that_only_the_device_knows_go_where_they_are_computed() -> None:
    buffers, sampled = make(), torch.tensor([70, 71, -1])
    decodes = [work(5, 1, 1), work(2, 1, 5), work(3, 1, 7)]
    step = plan(decodes[2], work(2, 4, 9), decodes[0], kind="mixed")
    buffers.fill(replace(step, sources=(2, -1, 0)), Bucket(8, 4), sampled=sampled)
    assert fields(buffers, Bucket(8, 4))["input_ids"] == [0, 102, 103, 104, 105, 70, 0, 0], "0 for what is no token"
    assert fields(buffers, Bucket(8, 4))["positions"] == [3, 2, 3, 4, 5, 5, 0, 0]
    buffers.fill(replace(plan(*decodes, kind="decode"), sources=range(3)), Bucket(4, 4, "decode"), sampled=sampled)
    assert fields(buffers, Bucket(4, 4, "decode"))["input_ids"] == [70, 71, 0, 0]
    known = replace(plan(*decodes[:2], kind="decode"), sources=(-1, 0))
    buffers.fill(known, Bucket(4, 4, "decode"), sampled=sampled)
    assert fields(buffers, Bucket(4, 4, "decode"))["input_ids"] == [105, 70, 0, 0], "the first is known"


def test_the_sampler_is_that_of_the_rows_that_run() -> None:
    buffers, bucket = make(), Bucket(2, 2, "decode")
    modes = []
    drawn = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)]
    first, plain, truncated = work(5, 1, 1), work(5, 1, 3, params=drawn[0]), work(5, 1, 5, params=drawn[1])
    for works in ((first,), (first, truncated), (first, plain), (plain,), (first,)):
        buffers.fill(plan(*works, kind="decode"), bucket)
        modes.append(buffers.sampling_mode)
        assert buffers.views(bucket).temperature.tolist()[: len(works)] == [w.request.params.temperature for w in works]
    assert modes == ["greedy", "truncated", "plain", "plain", "greedy"]
