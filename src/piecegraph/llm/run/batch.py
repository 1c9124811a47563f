"""A step's numbers in static buffers: one builder for warm-up, capture and replay.

A :class:`~piecegraph.llm.run.step.StepPlan` comes in; tensors at fixed addresses hold what the device needs to run it.
All small fields lie in one buffer that is written on the host and sent in one copy; block tables are sent by their
changes (:mod:`piecegraph.llm.cache.block_tables`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.llm.cache.block_tables import BlockTables
from piecegraph.llm.cache.paged import SequenceBlocks
from piecegraph.llm.kernels.race import random_keys
from piecegraph.llm.run.request import Request, SamplingParams
from piecegraph.llm.run.sampling import HOTTEST, SamplingMode, mode_of
from piecegraph.llm.run.step import MAX_PROMPTS, Bucket, StepPlan, Work
from piecegraph.llm.specs import AttentionBatch, SequenceRows, Span, StateBatch

_OF_PROMPTS = ("prompt_starts", "prompt_lens", "prompt_rows")
_ALIGNMENT = 128
"""Bytes: kernels load wide from addresses that are aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How large the buffers are, and which of the optional ones there are."""

    max_tokens: int
    max_seqs: int
    max_model_len: int
    block_size: int
    num_groups: int
    vocab_size: int
    has_mrope: bool = False
    """Whether the model also takes positions in three dimensions."""
    embed_width: int = 0
    """Hidden size, if requests may bring embeddings of their own; 0 for none."""
    embed_dtype: torch.dtype = torch.bfloat16

    @property
    def max_blocks(self) -> int:
        """Entries of a row of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_bytes(self) -> int:
        """What the buffers take on the device. The host mirrors most of it."""
        tables = self.num_groups * (self.max_seqs + MAX_PROMPTS) * self.max_blocks * torch.int32.itemsize
        embeds = self.max_tokens * self.embed_width * self.embed_dtype.itemsize
        return sum(field.num_bytes for field in _fields(self)) + tables + embeds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchViews:
    """The device tensors of one bucket, always at the same addresses. T tokens, S sequences, padding included."""

    input_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    mrope_positions: torch.Tensor | None
    """int64 [3, T]: time, height, width. The three of a token lie together."""
    input_embeds: torch.Tensor | None
    """[T, embed_width]; in place of an id's embedding where ``has_embeds`` says so, garbage elsewhere."""
    has_embeds: torch.Tensor | None
    """bool [T]."""
    attention: tuple[AttentionBatch, ...]
    """One for each group."""
    query_starts: torch.Tensor
    """int32 [S + 1]. Layers with state: a sequence with as many queries as its ``seq_lens`` begins in this step."""
    seq_lens: torch.Tensor
    """int32 [S]."""
    state_slots: torch.Tensor
    """int64 [S]."""
    logit_rows: torch.Tensor
    """int64 [S]: the last token of each sequence, whether it samples or not."""
    temperature: torch.Tensor
    """float32 [S]."""
    top_p: torch.Tensor
    """float32 [S]."""
    top_k: torch.Tensor
    """int64 [S]."""
    random_keys: torch.Tensor
    """int64 [S]."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    per: Literal["token", "seq", "step"]
    pad: float
    is_interleaved: bool = False
    """The rows of a token lie together: a view of some tokens then has the same strides in every bucket, which the
    compiled pieces rely on.
    """

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def aligned_bytes(self) -> int:
        """Where the next field begins, counted from the beginning of this one."""
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


class BatchBuffers:
    """The static buffers of every bucket.

    What a padded entry holds, by field (Note [Padding of a batch]):

    =================  =================  ====================================================================
    field              padded entry       why
    =================  =================  ====================================================================
    input_ids          0                  a valid index; its result is never looked at
    positions          0                  valid for every table of rotations
    mrope_positions    0                  the same
    has_embeds         False              nothing is read from ``input_embeds``, which is not padded
    slots              0                  block 0 belongs to no sequence and is never read
    query_starts       real tokens        a padded sequence has no queries
    prompt_starts      real tokens        the same; as those of sequences, for the prompts of a large mixed step
    prompt_lens        0
    prompt_rows        0
    seq_lens           0                  and no keys
    block table        0                  rows of sequences that left are cleared, and so are blocks given back
    state_slots        0                  slot 0 belongs to no sequence
    logit_rows         0                  a valid row; what is chosen from it is ignored
    temperature        0                  greedy: nothing is drawn
    top_k, top_p       0, 1               off
    random_keys        0                  not used
    =================  =================  ====================================================================

    Args:
        limits: see there.
        device: where the model runs.
    """

    def __init__(self, limits: BatchLimits, device: torch.device | str) -> None:
        self.limits = limits
        self.device = torch.device(device)
        self.sampling_mode: SamplingMode = "greedy"
        """What the sequences of the last step need (Note [Sampling modes])."""
        self.has_embeds = False
        """Whether tokens of the last step have embeddings of their own."""
        self._has_own_inputs = False
        """Whether a request of the last step brought embeddings or positions, if only for other tokens of it."""
        self._fields = _fields(limits)
        num_bytes = sum(field.aligned_bytes for field in self._fields)
        is_cuda = self.device.type == "cuda"
        self._staging = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self._host = {name: view.numpy() for name, view in _carve(self._staging, self._fields).items()}
        self._tensors = _carve(self._buffer, self._fields)
        self.tables = BlockTables(limits.num_groups, limits.max_seqs, max(1, limits.max_blocks), self.device)
        shape = (limits.num_groups, MAX_PROMPTS, max(1, limits.max_blocks))
        self._prompt_tables = torch.zeros(shape, dtype=torch.int32, device=self.device)
        width = limits.embed_width
        self._embeds = (
            torch.zeros((limits.max_tokens, width), dtype=limits.embed_dtype, device=self.device) if width else None
        )
        self._seeds = np.zeros(limits.max_seqs, np.uint64)
        self._mrope_deltas = np.zeros(limits.max_seqs, np.int64)
        self._count = np.arange(max(limits.max_tokens, limits.max_seqs) + 1)
        self.works: tuple[Work, ...] = ()
        """Of the last step."""
        # A sequence is known by its blocks: a new object for every admission.
        self._rows: list[SequenceBlocks | None] = []
        self._versions: list[int] = []
        self._views: dict[Bucket, BatchViews] = {}
        self._sent = torch.cuda.Event() if is_cuda else None

    # ------------------------------------------------------------------ what the device sees

    def views(self, bucket: Bucket) -> BatchViews:
        """The tensors of a bucket: the same objects every time."""
        if bucket not in self._views:
            self._views[bucket] = self._make_views(bucket)
        return self._views[bucket]

    def _make_views(self, bucket: Bucket) -> BatchViews:
        limits, tensors = self.limits, self._tensors
        num_tokens, num_seqs = bucket.num_tokens, bucket.num_seqs
        cut = {
            field.name: tensors[field.name][..., : num_tokens if field.per == "token" else num_seqs]
            for field in self._fields
            if field.per != "step"
        }
        query_starts, slots = tensors["query_starts"][: num_seqs + 1], cut.pop("slots")
        del cut["query_starts"]
        starts, lens, _ = (tensors[name] for name in _OF_PROMPTS)
        attention = tuple(
            AttentionBatch(
                query_starts=query_starts,
                seq_lens=cut["seq_lens"],
                block_table=self.tables.device[g, :num_seqs],
                slots=slots[g],
                block_size=limits.block_size,
                max_query_len=1 if bucket.kind == "decode" else min(num_tokens, limits.max_model_len),
                max_seq_len=limits.max_model_len,
                prompts=SequenceRows(starts, lens, self._prompt_tables[g]) if bucket.separates_prompts else None,
            )
            for g in range(limits.num_groups)
        )
        return BatchViews(
            attention=attention,
            query_starts=query_starts,
            input_embeds=self._embeds[:num_tokens] if self._embeds is not None else None,
            mrope_positions=cut.pop("mrope_positions", None),
            has_embeds=cut.pop("has_embeds", None),
            **cut,
        )

    def state_batch(self, bucket: Bucket) -> StateBatch:
        """Where the sequences of the last step keep their states."""
        views, spans, row = self.views(bucket), [], 0
        for work in self.works:
            spans.append(Span(row, row + work.num_tokens, work.is_first, work.request.state_slot))
            row += work.num_tokens
        return StateBatch(
            query_starts=views.query_starts,
            seq_lens=views.seq_lens,
            state_slots=views.state_slots,
            spans=tuple(spans),
            max_query_len=1 if bucket.kind == "decode" else bucket.num_tokens,
        )

    # ------------------------------------------------------------------ what the host writes

    def fill(self, plan: StepPlan, bucket: Bucket, *, sampled: torch.Tensor | None = None) -> None:
        """Write a step and send it, without waiting for the device.

        Args:
            plan: the step.
            bucket: the size it runs at.
            sampled: for a decode step: its tokens, which only the device knows yet.
        """
        self.write(plan, is_sampled=sampled is not None)
        self.send(plan, bucket, sampled=sampled)

    def write(self, plan: StepPlan, *, is_sampled: bool = False) -> None:
        """Write a step on the host. From then on ``sampling_mode`` and ``has_embeds`` are its own, by which the size
        it runs at may be chosen; :meth:`send` comes next.
        """
        if self._sent is not None:
            self._sent.synchronize()  # the copy of the last step reads the memory that is written now
        num_seqs = plan.num_seqs
        self.works = plan.works
        self._place(plan.works)
        rows, starts = self._write_sequences(plan)
        self._write_tokens(plan, rows, starts, is_sampled=is_sampled)
        if self.sampling_mode != "greedy":
            host = self._host
            host["random_keys"][:num_seqs] = random_keys(self._seeds[:num_seqs], host["seq_lens"][:num_seqs])

    def send(self, plan: StepPlan, bucket: Bucket, *, sampled: torch.Tensor | None = None) -> None:
        """Pad what was written to a size, and send it."""
        num_tokens, num_seqs = plan.num_tokens, plan.num_seqs
        assert num_tokens <= bucket.num_tokens <= self.limits.max_tokens, (num_tokens, bucket)
        assert num_seqs <= bucket.num_seqs <= self.limits.max_seqs, (num_seqs, bucket)
        assert plan.kind == "decode" or bucket.kind == "mixed", bucket
        self._pad(num_tokens, num_seqs, bucket)
        if bucket.separates_prompts:
            self._write_prompts(plan)
        self._buffer.copy_(self._staging, non_blocking=True)
        if sampled is not None:
            # Where the logits were not numbers the token is negative: the step is for nothing, but must not fail.
            torch.clamp(sampled[:num_tokens], min=0, out=self._tensors["input_ids"][:num_tokens])
        self.tables.send()
        if bucket.separates_prompts:
            torch.index_select(self.tables.device, 1, self._tensors["prompt_rows"], out=self._prompt_tables)
        if self._sent is not None:
            self._sent.record()

    def fill_dummy(self, bucket: Bucket, *, context: int = 0, num_blocks: int = 1) -> None:
        """Fill a bucket with sequences that read and write block 0, for warm-up, capture and timing.

        Their tokens differ, as those of real ones do: experts are chosen by them, and even a matmul takes less time and
        power on rows that are all the same.

        Args:
            context: tokens of each sequence that are in the cache already; for a decode bucket at least one.
            num_blocks: how many blocks of the cache, from block 0 on, a sequence goes through in turn: while they last,
                it does not overwrite its own keys. All but block 0 may belong to requests, or hold their prefixes.
        """
        limits = self.limits
        context = min(max(context, 1 if bucket.kind == "decode" else 0), limits.max_model_len - 1)
        num_seqs = min(bucket.num_seqs, bucket.num_tokens)
        if bucket.separates_prompts:
            num_seqs = min(num_seqs, MAX_PROMPTS)
        share, rest = divmod(bucket.num_tokens, num_seqs)
        works = []
        for i in range(num_seqs):
            num_tokens = min(share + (i < rest), limits.max_model_len - context)
            tokens = [(i + position) % limits.vocab_size for position in range(context + num_tokens)]
            request = Request(f"warm-up {i}", tokens, SamplingParams())
            request.blocks = blocks = SequenceBlocks(limits.num_groups)
            table = [j % num_blocks for j in range(-(-len(request.tokens) // limits.block_size))]
            blocks.tables = [table] * limits.num_groups
            works.append(Work(request, context, num_tokens, True))
        self.fill(StepPlan(tuple(works), sum(work.num_tokens for work in works), bucket.kind), bucket)

    def _place(self, works: Sequence[Work]) -> None:
        """Bring the block tables up to date, and what a sequence keeps from step to step."""
        rows = [work.request.blocks for work in works]
        versions = [blocks.version if blocks is not None else 0 for blocks in rows]
        if rows == self._rows:
            for row, (old, new) in enumerate(zip(self._versions, versions, strict=True)):
                if old != new:
                    self.tables.place(row, rows[row])
        else:
            self.tables.place_all(rows)
            self._write_requests([work.request for work in works])
            self._rows = rows
        self._versions = versions

    def _write_requests(self, requests: Sequence[Request]) -> None:
        """What changes only when other sequences run, or the same in other rows."""
        host, num_seqs = self._host, len(requests)
        all_params = [request.params for request in requests]
        host["temperature"][:num_seqs] = [min(params.temperature, HOTTEST) for params in all_params]
        host["top_p"][:num_seqs] = [params.top_p for params in all_params]
        host["top_k"][:num_seqs] = [min(params.top_k, 1 << 31) for params in all_params]
        host["state_slots"][:num_seqs] = [request.state_slot for request in requests]
        host["random_keys"][:num_seqs] = 0
        self._seeds[:num_seqs] = [request.seed for request in requests]
        self._mrope_deltas[:num_seqs] = [request.mrope_delta for request in requests]
        self._has_own_inputs = any(
            request.input_embeds is not None or request.mrope_positions is not None for request in requests
        )
        modes = {mode_of(params) for params in all_params}
        self.sampling_mode = "truncated" if "truncated" in modes else "plain" if "plain" in modes else "greedy"

    def _write_sequences(self, plan: StepPlan) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """The fields of each sequence; returns the sequence of each token, and the first position of each sequence."""
        host, works, num_seqs = self._host, plan.works, plan.num_seqs
        starts = np.array([work.start for work in works])
        query_starts = host["query_starts"]
        if plan.kind == "decode":
            rows = self._count[:num_seqs]
            query_starts[: num_seqs + 1] = self._count[: num_seqs + 1]
            host["seq_lens"][:num_seqs] = starts + 1
            host["logit_rows"][:num_seqs] = rows
        else:
            lengths = np.array([work.num_tokens for work in works])
            rows = np.repeat(self._count[:num_seqs], lengths)
            query_starts[0] = 0
            np.cumsum(lengths, out=query_starts[1 : num_seqs + 1])
            host["seq_lens"][:num_seqs] = starts + lengths
            host["logit_rows"][:num_seqs] = query_starts[1 : num_seqs + 1] - 1
        return rows, starts

    def _write_prompts(self, plan: StepPlan) -> None:
        """The sequences behind those that come first with one token each."""
        host, num_decodes, num_seqs = self._host, plan.num_decodes, plan.num_seqs
        starts, lens, rows = (host[name] for name in _OF_PROMPTS)
        num_prompts = num_seqs - num_decodes
        starts[:num_prompts] = host["query_starts"][num_decodes:num_seqs]
        starts[num_prompts:] = plan.num_tokens
        lens[:num_prompts], lens[num_prompts:] = host["seq_lens"][num_decodes:num_seqs], 0
        rows[:num_prompts], rows[num_prompts:] = self._count[num_decodes:num_seqs], 0

    def _write_tokens(
        self, plan: StepPlan, rows: NDArray[np.integer], starts: NDArray[np.integer], *, is_sampled: bool
    ) -> None:
        """The fields of each token."""
        host, num_tokens, size = self._host, plan.num_tokens, self.limits.block_size
        positions = host["positions"][:num_tokens]
        if plan.kind == "decode":
            positions[:] = starts
            if not is_sampled:
                host["input_ids"][:num_tokens] = [work.request.tokens[work.start] for work in plan.works]
        else:
            np.add(self._count[:num_tokens], (starts - host["query_starts"][: plan.num_seqs])[rows], out=positions)
            ids, first = host["input_ids"], 0
            for request, start, length, _ in plan.works:
                ids[first : first + length] = request.tokens[start : start + length]
                first += length
        indices, offsets = np.divmod(positions, size)
        slots = host["slots"]
        for g in range(self.limits.num_groups):
            np.add(self.tables.mirror[g][rows, indices].astype(np.int64) * size, offsets, out=slots[g, :num_tokens])
        if self.limits.has_mrope:
            # Text lies on the diagonal; what is generated goes on behind the largest position of the prompt.
            np.add(positions, self._mrope_deltas[: plan.num_seqs][rows], out=host["mrope_positions"][:, :num_tokens])
        self.has_embeds = False
        if self._has_own_inputs:
            self._write_own_inputs(plan.works)

    def _write_own_inputs(self, works: Sequence[Work]) -> None:
        """Positions in three dimensions and embeddings, where a request brings its own for its prompt."""
        host, first = self._host, 0
        for request, start, length, _ in works:
            num_given = max(0, min(length, request.num_prompt - start))
            given, end = slice(start, start + num_given), first + num_given
            if request.mrope_positions is not None and self.limits.has_mrope:
                host["mrope_positions"][:, first:end] = request.mrope_positions[:, given]
            if self._embeds is not None:
                host["has_embeds"][first : first + length] = False
                if request.input_embeds is not None and num_given:
                    self.has_embeds = True
                    host["has_embeds"][first:end] = True
                    self._embeds[first:end].copy_(request.input_embeds[given], non_blocking=True)
            first += length

    def _pad(self, num_tokens: int, num_seqs: int, bucket: Bucket) -> None:
        ends = {"token": (num_tokens, bucket.num_tokens), "seq": (num_seqs, bucket.num_seqs), "step": (0, 0)}
        for field in self._fields:
            real, end = ends[field.per]
            if real < end:
                self._host[field.name][..., real:end] = field.pad
        self._host["query_starts"][num_seqs : bucket.num_seqs + 1] = num_tokens


def _fields(limits: BatchLimits) -> tuple[_Field, ...]:
    tokens, seqs = limits.max_tokens, limits.max_seqs
    fields = [
        _Field("seq_lens", torch.int32, (seqs,), "seq", 0),
        _Field("state_slots", torch.int64, (seqs,), "seq", 0),
        _Field("logit_rows", torch.int64, (seqs,), "seq", 0),
        _Field("temperature", torch.float32, (seqs,), "seq", 0),
        _Field("top_p", torch.float32, (seqs,), "seq", 1),
        _Field("top_k", torch.int64, (seqs,), "seq", 0),
        _Field("random_keys", torch.int64, (seqs,), "seq", 0),
        _Field("input_ids", torch.int64, (tokens,), "token", 0),
        _Field("positions", torch.int64, (tokens,), "token", 0),
        _Field("slots", torch.int64, (limits.num_groups, tokens), "token", 0),
        # One entry more than sequences; its padding is written apart.
        _Field("query_starts", torch.int32, (seqs + 1,), "seq", 0),
        _Field("prompt_starts", torch.int32, (MAX_PROMPTS + 1,), "step", 0),
        _Field("prompt_lens", torch.int32, (MAX_PROMPTS,), "step", 0),
        _Field("prompt_rows", torch.int64, (MAX_PROMPTS,), "step", 0),
    ]
    if limits.has_mrope:
        fields.append(_Field("mrope_positions", torch.int64, (3, tokens), "token", 0, is_interleaved=True))
    if limits.embed_width:
        fields.append(_Field("has_embeds", torch.bool, (tokens,), "token", 0))
    return tuple(fields)


def _carve(buffer: torch.Tensor, fields: Sequence[_Field]) -> dict[str, torch.Tensor]:
    """A view of the buffer for each field."""
    views, first = {}, 0
    for field in fields:
        flat = buffer[first : first + field.num_bytes].view(field.dtype)
        views[field.name] = flat.view(field.shape[::-1]).t() if field.is_interleaved else flat.view(field.shape)
        first += field.aligned_bytes
    return views
