"""A step's numbers in static buffers: one builder for warm-up, capture and replay.

A :class:`~piecegraph.llm.run.step.StepPlan` comes in; tensors at fixed addresses hold what the device needs to run it.
All small fields lie in one buffer that is written on the host and sent in one copy; block tables are sent by their
changes (:mod:`piecegraph.llm.cache.block_tables`).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from piecegraph.llm.cache.block_tables import BlockTables
from piecegraph.llm.cache.paged import SequenceBlocks
from piecegraph.llm.kernels.race import random_keys
from piecegraph.llm.run.adjustment_buffers import EntryBuffers
from piecegraph.llm.run.masks import MaskBuffers
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling import HOTTEST, SamplingMode, mode_of
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.run.step import MAX_PROMPTS, Bucket, StepPlan, Work
from piecegraph.llm.run.upload import Upload
from piecegraph.llm.specs import SHORT_CONTEXT, AttentionBatch, SequenceRows, Span, StateBatch

_OF_PROMPTS = ("prompt_starts", "prompt_lens", "prompt_rows")
_MODES: tuple[SamplingMode, ...] = ("greedy", "plain", "truncated")
"""Each does what those before it do."""
_MODE_BITS, _OWN_INPUTS, _ADJUSTED, _GUIDED = 7, 8, 16, 32
"""The traits of a row: a bit for each mode, and for what else is asked of its steps."""
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
    min_p: torch.Tensor
    """float32 [S]."""
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
    min_p              0                  off
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
        self.num_adjusted = 0
        """The length of the buffer with what they add to their logits (Note [Adjusted logits]); 0 for none."""
        self.entries = EntryBuffers(self.device)
        self._has_adjustments = False
        self.has_masks = False
        """Whether some of them may only go on with some tokens (Note [Masks behind the decoder])."""
        self.masks = MaskBuffers(limits.max_seqs, limits.vocab_size, self.device)
        self._has_guides = False
        self.has_embeds = False
        """Whether tokens of the last step have embeddings of their own."""
        self._num_sampled = 0
        """How many tokens of the last step only the device knows."""
        self._is_sampled_in_order = False
        """Whether these are all, in the order of the step before."""
        self._has_own_inputs = False
        """Whether a request of the last step brought embeddings or positions, if only for other tokens of it."""
        self._fields = _fields(limits)
        num_bytes = sum(field.aligned_bytes for field in self._fields)
        is_cuda = self.device.type == "cuda"
        self._staging = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._arrived = torch.zeros_like(self._staging, device=self.device) if is_cuda else self._staging
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self._host = {name: view.numpy() for name, view in _carve(self._staging, self._fields).items()}
        self._padded = {
            per: [(self._host[field.name], field.pad) for field in self._fields if field.per == per]
            for per in ("token", "seq")
        }
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
        self._traits = [0] * limits.max_seqs
        """Of each row: what is asked of the step, in bits."""
        self._count = np.arange(max(limits.max_tokens, limits.max_seqs) + 1)
        self._first_entries = self._count[: limits.max_seqs] * self.tables.mirror.shape[-1]
        """Of each row: where its blocks begin in a table, entry by entry."""
        self._block_indices = np.arange(limits.max_blocks).repeat(limits.block_size)
        """Of each position. Looked up, as numpy divides by instructions at which many a CPU slows down for a while."""
        self.works: tuple[Work, ...] = ()
        """Of the last step."""
        # A sequence is known by its blocks: a new object for every admission.
        self._rows: list[SequenceBlocks | None] = []
        self._dummy: tuple[Bucket, int, int] | None = None
        """What :meth:`fill_dummy` was last called for, if nothing was written since."""
        self._views: dict[Bucket, BatchViews] = {}
        self._upload = Upload(self.device)

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
                max_seq_len=min(limits.max_model_len, SHORT_CONTEXT) if bucket.is_short else limits.max_model_len,
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
            sampled: what the step before chose, if the plan goes on from that (:attr:`StepPlan.sources`).
        """
        self.write(plan)
        self.send(plan, bucket, num_adjusted=self.num_adjusted, sampled=sampled)

    def write(self, plan: StepPlan) -> None:
        """Write a step on the host. From then on ``sampling_mode``, ``has_embeds``, ``num_adjusted`` and ``has_masks``
        are its own, by which the size it runs at may be chosen; :meth:`send` comes next.
        """
        self._upload.wait()  # the copy of the last step reads the memory that is written now
        self._dummy = None
        num_seqs = plan.num_seqs
        self.works = plan.works
        self._place(plan.works)
        self._write_tokens(plan, *self._write_sequences(plan))
        if self.sampling_mode != "greedy":
            host = self._host
            host["random_keys"][:num_seqs] = random_keys(self._seeds[:num_seqs], host["seq_lens"][:num_seqs])
        self.num_adjusted = self.entries.collect(plan.works if self._has_adjustments else ())
        self.has_masks = self.masks.collect(plan.works if self._has_guides else ())

    def send(self, plan: StepPlan, bucket: Bucket, *, num_adjusted: int, sampled: torch.Tensor | None = None) -> None:
        """Pad what was written to a size, and send it: see Note [Copies beside steps].

        Args:
            plan: what was written.
            bucket: the size.
            num_adjusted: the length of the buffer that the step reads adjustments from; 0 for none.
            sampled: what the step before chose, if it is not committed yet.
        """
        num_tokens, num_seqs = plan.num_tokens, plan.num_seqs
        assert num_tokens <= bucket.num_tokens <= self.limits.max_tokens, (num_tokens, bucket)
        assert num_seqs <= bucket.num_seqs <= self.limits.max_seqs, (num_seqs, bucket)
        assert plan.kind == "decode" or bucket.kind == "mixed", bucket
        self._pad(num_tokens, num_seqs, bucket)
        if bucket.separates_prompts:
            self._write_prompts(plan)
        is_beside = sampled is not None
        with self._upload.sending(is_beside=is_beside):
            (self._arrived if is_beside else self._buffer).copy_(self._staging, non_blocking=True)
            self.tables.send()
        if sampled is not None:
            self._buffer.copy_(self._arrived)
            self._take_sampled(sampled)
        self.entries.send(num_adjusted)
        self.tables.use_sent()
        if bucket.separates_prompts:
            torch.index_select(self.tables.device, 1, self._tensors["prompt_rows"], out=self._prompt_tables)
        self._upload.end_use()

    def _take_sampled(self, sampled: torch.Tensor) -> None:
        """Tokens that only the device knows go where they are computed.

        Where the logits were not numbers the token is negative: the step is for nothing, but must not fail.
        """
        ids, count = self._tensors["input_ids"], self._num_sampled
        if self._is_sampled_in_order:
            torch.clamp(sampled[:count], min=0, out=ids[:count])
        elif count:
            chosen = sampled.index_select(0, self._tensors["sampled_rows"][:count]).clamp_(min=0)
            ids.index_copy_(0, self._tensors["sampled_places"][:count], chosen)

    def fill_dummy(self, bucket: Bucket, *, context: int = 0, num_blocks: int = 1) -> None:
        """Fill a bucket with sequences that read and write block 0, for warm-up, capture and timing.

        Their tokens differ, as those of real ones do: experts are chosen by them, and even a matmul takes less time and
        power on rows that are all the same.

        Args:
            context: tokens of each sequence that are in the cache already; for a decode bucket at least one.
            num_blocks: how many blocks of the cache, from block 0 on, a sequence goes through in turn: while they last,
                it does not overwrite its own keys. All but block 0 may belong to requests, or hold their prefixes.
        """
        asked = bucket, context, num_blocks
        if asked == self._dummy:
            return
        limits = self.limits
        context = min(max(context, 1 if bucket.kind == "decode" else 0), limits.max_model_len - 1)
        num_seqs = min(bucket.num_seqs, bucket.num_tokens)
        if bucket.separates_prompts:
            num_seqs = min(num_seqs, MAX_PROMPTS)
        share, rest = divmod(bucket.num_tokens, num_seqs)
        works, params = [], SamplingParams()
        for i in range(num_seqs):
            num_tokens = min(share + (i < rest), limits.max_model_len - context)
            tokens = [(i + position) % limits.vocab_size for position in range(context + num_tokens)]
            request = Request(f"warm-up {i}", tokens, params)
            request.blocks = blocks = SequenceBlocks(limits.num_groups)
            table = [j % num_blocks for j in range(-(-len(request.tokens) // limits.block_size))]
            blocks.tables = [table] * limits.num_groups
            works.append(Work(request, context, num_tokens, True))
        self.fill(StepPlan(tuple(works), sum(work.num_tokens for work in works), bucket.kind), bucket)
        self._dummy = asked

    def _place(self, works: Sequence[Work]) -> None:
        """Bring the block tables up to date, and what a sequence keeps from step to step."""
        rows = [work.request.blocks for work in works]
        if rows != self._rows:
            num_before = len(self._rows)
            changed = [row for row, (new, old) in enumerate(zip(rows, self._rows, strict=False)) if new is not old]
            self._write_requests([*changed, *range(num_before, len(rows))], works)
            self._rows = rows
        self.tables.place_all(rows)

    def _write_requests(self, rows: Sequence[int], works: Sequence[Work]) -> None:
        """What changes only when other sequences run, or the same in other rows."""
        host = self._host
        for row in rows:
            request = works[row].request
            params = request.params
            host["temperature"][row] = min(params.temperature, HOTTEST)
            host["top_p"][row] = params.top_p
            host["min_p"][row] = params.min_p
            host["top_k"][row] = min(params.top_k, 1 << 31)
            host["state_slots"][row] = request.state_slot
            host["random_keys"][row] = 0
            self._seeds[row] = request.seed
            self._mrope_deltas[row] = request.mrope_delta
            self._traits[row] = _traits(request)
        traits = functools.reduce(operator.or_, set(self._traits[: len(works)]))
        self._has_own_inputs = traits & _OWN_INPUTS > 0
        self._has_adjustments = traits & _ADJUSTED > 0
        self._has_guides = traits & _GUIDED > 0
        self.sampling_mode = _MODES[(traits & _MODE_BITS).bit_length() - 1]

    def _write_sequences(self, plan: StepPlan) -> tuple[Sequence[int], Sequence[int]]:
        """The fields of each sequence; returns the first token and the number of tokens of each."""
        host, works, num_seqs = self._host, plan.works, plan.num_seqs
        query_starts, seq_lens, logit_rows = host["query_starts"], host["seq_lens"], host["logit_rows"]
        if plan.kind == "decode":
            query_starts[: num_seqs + 1] = self._count[: num_seqs + 1]
            seq_lens[:num_seqs] = [work.start + 1 for work in works]
            logit_rows[:num_seqs] = self._count[:num_seqs]
            return range(num_seqs), (1,)
        # Lists: most steps with prompts have few sequences, and to numpy one number is as much as hundreds.
        lengths = [work.num_tokens for work in works]
        firsts = [0, *itertools.accumulate(lengths)]
        query_starts[: num_seqs + 1] = firsts
        seq_lens[:num_seqs] = [work.start + work.num_tokens for work in works]
        logit_rows[:num_seqs] = [end - 1 for end in firsts[1:]]
        return firsts[:-1], lengths

    def _write_prompts(self, plan: StepPlan) -> None:
        """The sequences behind those that come first with one token each."""
        host, num_decodes, num_seqs = self._host, plan.num_decodes, plan.num_seqs
        starts, lens, rows = (host[name] for name in _OF_PROMPTS)
        num_prompts = num_seqs - num_decodes
        starts[:num_prompts] = host["query_starts"][num_decodes:num_seqs]
        starts[num_prompts:] = plan.num_tokens
        lens[:num_prompts], lens[num_prompts:] = host["seq_lens"][num_decodes:num_seqs], 0
        rows[:num_prompts], rows[num_prompts:] = self._count[num_decodes:num_seqs], 0

    def _write_tokens(self, plan: StepPlan, firsts: Sequence[int], lengths: Sequence[int]) -> None:
        """The fields of each token."""
        host, num_tokens, num_seqs, size = self._host, plan.num_tokens, plan.num_seqs, self.limits.block_size
        positions, entries = host["positions"][:num_tokens], self._first_entries[:num_seqs]
        if plan.kind == "decode":
            np.subtract(host["seq_lens"][:num_seqs], 1, out=positions)
        else:
            shifts = [work.start - first for work, first in zip(plan.works, firsts, strict=True)]
            np.add(self._count[:num_tokens], np.array(shifts).repeat(lengths), out=positions)
            entries = entries.repeat(lengths)
        self._write_ids(plan, firsts)
        # A position is the index of its block times their size, and what is left over; so nothing is divided here.
        indices = self._block_indices.take(positions)
        entries = entries + indices
        for table, slots in zip(self.tables.flat, host["slots"], strict=True):
            used = slots[:num_tokens]
            np.multiply(table.take(entries) - indices, size, out=used)
            used += positions
        if self.limits.has_mrope:
            # Text lies on the diagonal; what is generated goes on behind the largest position of the prompt.
            deltas = self._mrope_deltas[:num_seqs].repeat(lengths)
            np.add(positions, deltas, out=host["mrope_positions"][:, :num_tokens])
        self.has_embeds = False
        if self._has_own_inputs:
            self._write_own_inputs(plan.works)

    def _write_ids(self, plan: StepPlan, places: Sequence[int]) -> None:
        """The ids of tokens that are known, and where the others come from and go to."""
        host, works = self._host, plan.works
        known: Sequence[Work] = works
        self._is_sampled_in_order = isinstance(plan.sources, range)
        if self._is_sampled_in_order:
            self._num_sampled = plan.num_tokens
            return
        if plan.sources is not None:
            sources = np.array(plan.sources)
            pending = np.flatnonzero(sources >= 0)
            self._num_sampled = count = len(pending)
            host["sampled_rows"][:count] = sources[pending]
            host["sampled_places"][:count] = host["query_starts"][pending]
            rows = np.flatnonzero(sources < 0).tolist()
            known, places = [works[row] for row in rows], [places[row] for row in rows]
        if plan.kind == "decode":
            host["input_ids"][list(places)] = [work.request.tokens[work.start] for work in known]
            return
        ids = host["input_ids"]
        for first, (request, start, length, _) in zip(places, known, strict=True):
            ids[first : first + length] = request.tokens[start : start + length]

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
        for per, real, end in (("token", num_tokens, bucket.num_tokens), ("seq", num_seqs, bucket.num_seqs)):
            if real < end:
                for entries, padding in self._padded[per]:
                    entries[..., real:end] = padding
        self._host["query_starts"][num_seqs : bucket.num_seqs + 1] = num_tokens


def _traits(request: Request) -> int:
    """What a request asks of its steps, in bits."""
    has_own_inputs = request.input_embeds is not None or request.mrope_positions is not None
    traits = 1 << _MODES.index(mode_of(request.params))
    traits |= _OWN_INPUTS if has_own_inputs else 0
    traits |= _ADJUSTED if request.adjustments is not None else 0
    return traits | (_GUIDED if request.guide is not None else 0)


def _fields(limits: BatchLimits) -> tuple[_Field, ...]:
    tokens, seqs = limits.max_tokens, limits.max_seqs
    fields = [
        _Field("seq_lens", torch.int32, (seqs,), "seq", 0),
        _Field("state_slots", torch.int64, (seqs,), "seq", 0),
        _Field("logit_rows", torch.int64, (seqs,), "seq", 0),
        _Field("temperature", torch.float32, (seqs,), "seq", 0),
        _Field("top_p", torch.float32, (seqs,), "seq", 1),
        _Field("top_k", torch.int64, (seqs,), "seq", 0),
        _Field("min_p", torch.float32, (seqs,), "seq", 0),
        _Field("random_keys", torch.int64, (seqs,), "seq", 0),
        # Of tokens that the step before chose: where they are among its rows, and where they go.
        _Field("sampled_rows", torch.int64, (seqs,), "step", 0),
        _Field("sampled_places", torch.int64, (seqs,), "step", 0),
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
