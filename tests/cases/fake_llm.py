"""A model without a model: the next token is a hash of all that the model can see, read from paged memory.

The memory is written and read through the batch's own slots and block tables, so a wrong slot, a block that was given
back too early, a wrong prefix hit or stale padding gives other tokens than :func:`alone`.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from piecegraph.llm.cache.paged import CacheGroup, PagedCache
from piecegraph.llm.run.batch import BatchBuffers, BatchLimits
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.scheduler import Scheduler, SchedulerLimits
from piecegraph.llm.run.step import Bucket, StepPlan

VOCAB_SIZE = 23
EOS = 0


def next_token(visible: Sequence[Sequence[int]]) -> int:
    """From the tokens that each group can see."""
    return zlib.crc32(b"|".join(array("q", tokens).tobytes() for tokens in visible)) % VOCAB_SIZE


def first_visible(group: CacheGroup, position: int) -> int:
    """As transformers' masks have it, position by position."""
    return next(
        key
        for key in range(position + 1)
        if (not group.window or position - group.window < key)
        and (not group.chunk or key // group.chunk == position // group.chunk)
    )


def alone(prompt: Sequence[int], params: SamplingParams, groups: Sequence[CacheGroup], max_model_len: int) -> list[int]:
    """What a request generates when nothing is cached and nobody else is there."""
    tokens = list(prompt)
    longest = min(max_model_len, len(tokens) + params.max_new_tokens)
    while len(tokens) < longest:
        last = len(tokens) - 1
        tokens.append(next_token([tokens[first_visible(group, last) :] for group in groups]))
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


class FakeLLM:
    """Scheduler, buffers and the fake model, put together as an engine does."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        block_size: int,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_model_len: int = 64,
        prefix_cache: bool = True,
        needs_state: bool = False,
        looks_ahead: bool = False,
        sizes: Sequence[int] = (),
    ) -> None:
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
        )
        self.groups, self.block_size = tuple(groups), block_size
        self.cache = PagedCache(groups, block_size=block_size, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(
            limits, self.cache, sizes=lambda: sizes, eos_token_ids=[EOS], needs_state=needs_state
        )
        self.buffers = BatchBuffers(
            BatchLimits(
                max_tokens=max_batch_tokens + 3,
                max_seqs=max_num_seqs + 3,
                max_model_len=max_model_len,
                block_size=block_size,
                num_groups=len(self.groups),
                vocab_size=VOCAB_SIZE,
            ),
            "cpu",
        )
        self.memory = [np.full((group.num_blocks * block_size, 2), -1) for group in self.groups]
        self.plans: list[StepPlan] = []
        self._looks_ahead = looks_ahead
        self._ahead: tuple[StepPlan, list[int]] | None = None
        self.num_ahead = 0

    def step(self, num_padded: int = 0) -> list[Request] | None:
        """One step of all requests; the finished ones, or None if there was nothing to do."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            plan, tokens = ahead
        elif (found := self.scheduler.schedule()) is not None:
            plan = found
            tokens = self._run_plan(plan, num_padded)
        else:
            return None
        if self._looks_ahead and (following := self.scheduler.schedule_ahead(plan)) is not None:
            self.num_ahead += 1
            self._ahead = following, self._run_plan(following, num_padded, tokens)
        finished = self.scheduler.commit(plan, tokens[: plan.num_seqs])
        if self._ahead is None:
            self.scheduler.check()
        queue = [each.arrival_time for each in (*self.scheduler.running, *self.scheduler.waiting)]
        assert queue == sorted(queue)
        assert len(self.scheduler.running) <= self.scheduler.limits.max_num_seqs
        return finished

    def _run_plan(self, plan: StepPlan, num_padded: int, before: list[int] | None = None) -> list[int]:
        """The tokens of a step, which may go on from those of one that is not committed."""
        self.plans.append(plan)
        num_seqs = plan.num_seqs + num_padded
        num_tokens = num_seqs if plan.kind == "decode" else plan.num_tokens + num_padded
        return self.forward(plan, Bucket(num_tokens, num_seqs, plan.kind), before)

    def run(self) -> None:
        while self.step() is not None:
            pass

    def forward(self, plan: StepPlan, bucket: Bucket, before: list[int] | None = None) -> list[int]:
        self.buffers.fill(plan, bucket, sampled=None if before is None else torch.tensor(before))
        views = self.buffers.views(bucket)
        for memory, batch in zip(self.memory, views.attention, strict=True):
            memory[batch.slots.numpy(), 0] = views.input_ids.numpy()
            memory[batch.slots.numpy(), 1] = views.positions.numpy()
        self._check_tables(plan)
        starts, lengths = views.query_starts.tolist(), views.seq_lens.tolist()
        return [
            self._sequence(bucket, row, lengths[row], starts[row + 1] - starts[row]) for row in range(bucket.num_seqs)
        ]

    def _check_tables(self, plan: StepPlan) -> None:
        expected = np.zeros_like(self.buffers.tables.mirror)
        for row, work in enumerate(plan.works):
            assert work.request.blocks is not None
            for g, table in enumerate(work.request.blocks.tables):
                expected[g, row, : len(table)] = table
        assert (self.buffers.tables.device.numpy() == expected).all()

    def _sequence(self, bucket: Bucket, row: int, length: int, num_queries: int) -> int:
        if num_queries == 0:
            assert length == 0
            return 0
        visible = []
        for g, (group, memory) in enumerate(zip(self.groups, self.memory, strict=True)):
            table = self.buffers.views(bucket).attention[g].block_table[row].numpy()
            # What the first query sees must be there as well, though only the last one's result is used.
            positions = np.arange(first_visible(group, length - num_queries), length)
            blocks = table[positions // self.block_size]
            assert (blocks > 0).all(), "a visible block was given back"
            cells = memory[blocks * self.block_size + positions % self.block_size]
            assert (cells[:, 1] == positions).all(), "the memory of a token was overwritten"
            visible.append(cells[positions >= first_visible(group, length - 1), 0].tolist())
        return next_token(visible)
