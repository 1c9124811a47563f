"""How many blocks the cache gets, and which sizes of steps are recorded."""

from __future__ import annotations

import bisect
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from piecegraph.errors import ModelError
from piecegraph.llm.cache.paged import CacheGroup
from piecegraph.llm.run.batch import BatchLimits
from piecegraph.llm.run.scheduler import SchedulerLimits
from piecegraph.llm.run.step import FEW_MIXED, LONG_CONTEXT, Bucket, StepPlan
from piecegraph.llm.specs import SHORT_CONTEXT, Reach, StepKind
from piecegraph.tape.buckets import ladder


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNeeds:
    """What the sequences could use at most."""

    reaches: tuple[Reach, ...]
    bytes_per_block: tuple[int, ...]
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_batch_tokens: int
    max_tokens: int | None = None
    """What a group may hold at most, if that was asked for."""

    def most_blocks(self, group: int) -> int:
        """More than this many blocks of a group are never held at once. Block 0 is not counted."""
        reach = self.reaches[group]
        kind = CacheGroup(num_blocks=2, window=reach.window, chunk=reach.chunk)
        per_sequence = kind.most_blocks(self.max_model_len, self.block_size)
        # A chunk of a prompt is written before what lies behind its window is given back.
        in_flight = -(-self.max_batch_tokens // self.block_size) + self.max_num_seqs
        whole = -(-self.max_model_len // self.block_size)
        most = min(self.max_num_seqs * per_sequence + in_flight, self.max_num_seqs * whole)
        return most if self.max_tokens is None else min(most, -(-self.max_tokens // self.block_size))


def size_cache(needs: CacheNeeds, budget_bytes: int) -> tuple[int, ...]:
    """Blocks of each group, block 0 included: all that can be used, or as many as the budget allows.

    Groups with a window are cheap and come first, but get no more than half; the others share what is left, token for
    token.
    """
    if not needs.reaches:
        return ()
    groups = range(len(needs.reaches))
    blocks = [needs.most_blocks(group) + 1 for group in groups]
    limited = [group for group in groups if needs.reaches[group] != Reach()]
    full = [group for group in groups if group not in limited]
    total = sum(blocks[group] * needs.bytes_per_block[group] for group in groups)
    if total > budget_bytes:
        left = budget_bytes
        for shrinking in filter(None, (limited, full)):
            share = left // 2 if shrinking is limited and full else left
            fitting = share // sum(needs.bytes_per_block[group] for group in shrinking)
            for group in shrinking:
                blocks[group] = min(blocks[group], fitting)
                left -= blocks[group] * needs.bytes_per_block[group]
    if min(blocks) < 2:
        raise ModelError(
            "PG665",
            f"there is no room for the cache in {max(0, budget_bytes) / 2**20:.0f} MiB",
            why=f"a block of {needs.block_size} tokens takes {sum(needs.bytes_per_block) / 2**20:.2f} MiB",
            hint="free memory, raise memory_fraction, or lower max_num_seqs and max_model_len",
        )
    return tuple(blocks)


_HOST_BYTES_PER_SEQ = 1024
"""About what the host's lists and numbers of a sequence that may run take, besides the buffers."""


def check_batch(limits: BatchLimits, free_bytes: int) -> None:
    """Raise if the buffers of a step would not fit: allocating them might end the process, or others on the machine.

    Args:
        limits: how large they are.
        free_bytes: what the device and the host have for them.
    """
    num_bytes = limits.num_bytes + limits.max_seqs * _HOST_BYTES_PER_SEQ
    if num_bytes > free_bytes:
        raise ModelError(
            "PG665",
            f"there is no room for steps of max_num_seqs={limits.max_seqs} and max_batch_tokens={limits.max_tokens}",
            why=f"their buffers take {num_bytes // 2**20} MiB, and there is room for {free_bytes // 2**20} MiB",
            hint="lower max_num_seqs and max_batch_tokens",
        )


def check_states(num_bytes: int, max_num_seqs: int, free_bytes: int) -> None:
    """Raise if what layers with a state keep of each sequence would not fit."""
    if num_bytes > free_bytes:
        raise ModelError(
            "PG665",
            f"there is no room for the states of max_num_seqs={max_num_seqs}",
            why=f"they take {num_bytes // 2**20} MiB, and there is room for {free_bytes // 2**20} MiB",
            hint="lower max_num_seqs",
        )


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that steps are padded to; empty where steps run at their own size."""

    decode: tuple[int, ...]
    tokens: tuple[int, ...]
    seqs: tuple[int, ...]
    is_listed: bool = False
    """Whether the sizes were asked for one by one."""
    short_seqs: int = 0
    """Up to how many sequences of a step of decoding there is another size for short contexts, from half of them on."""
    only: Bucket | None = None
    """What every step is padded to, whatever is in it: see Note [Steps that are all alike]."""

    def bucket_for(self, plan: StepPlan) -> Bucket:
        """The smallest recorded bucket, or the step's own size if none is large enough."""
        if self.only is not None or plan.kind == "decode":
            bucket = self.decode_bucket(plan.num_seqs)
            return _short(bucket.num_seqs) if self._has_short(bucket.num_seqs) and plan.is_short else bucket
        num_tokens, num_seqs = _fit(plan.num_tokens, self.tokens), _fit(plan.num_seqs, self.seqs)
        is_short = num_seqs <= self._few_seqs or num_tokens <= FEW_MIXED
        if is_short and plan.has_long_decodes:  # see Note [Two kinds of rows]
            if not self.seqs:
                return _mixed(num_tokens, num_seqs, few_seqs=0)
            num_seqs, least = self.seqs[-1], _fit(FEW_MIXED + 1, self.tokens)
            num_tokens = max(num_tokens, least) if least in self.tokens else num_tokens
        return self._mixed(num_tokens, num_seqs)

    def decode_bucket(self, num_seqs: int) -> Bucket:
        """The same for a step of decoding."""
        if self.only is not None:
            return self.only
        size = _fit(num_seqs, self.decode)
        return Bucket(size, size, "decode")

    def at_start(self) -> list[Bucket]:
        """What is recorded whenever a model is loaded, so that every step finds a size that is not much too large.

        Of a ladder that nobody asked for, that is the powers of two and the last rung; of the small sizes, many of
        which take about the same time, a few: a quarter of it. Steps of decoding are not filled up with prompts: of
        these, there are some between large powers of two.
        """
        kernels = set(self.of_kernels())
        return [
            bucket
            for bucket in self.all()
            if (bucket in kernels and (self.is_listed or self._is_last(bucket) or _is_coarse(bucket)))
            or self._is_between(bucket)
        ]

    def of_kernels(self) -> list[Bucket]:
        """Sizes between which kernels are the same: powers of two and the last rung."""
        if self.only is not None or self.is_listed:
            return self.all()
        return [bucket for bucket in self.all() if self._is_last(bucket) or bucket.num_tokens.bit_count() == 1]

    def _is_last(self, bucket: Bucket) -> bool:
        return bucket == self.only or bucket.num_tokens in (*self.decode[-1:], *self.tokens[-1:])

    def _is_between(self, bucket: Bucket) -> bool:
        if bucket.kind != "decode":
            return False
        eighth = 1 << (self.decode[-1] // 8 - 1).bit_length()  # a power of two that is not less
        return bucket.num_seqs % max(_LEAST_BETWEEN, eighth) == 0

    def all(self) -> list[Bucket]:
        """Everything that may be recorded."""
        if self.only is not None:
            return [self.only]
        mixed = dict.fromkeys(self._mixed(size, seqs) for size in self.tokens for seqs in self.seqs)
        short = (_short(size) for size in self.decode if self._has_short(size))
        return [*(Bucket(size, size, "decode") for size in self.decode), *short, *mixed]

    def _has_short(self, num_seqs: int) -> bool:
        """Fewer have as many programs of attention either way."""
        return self.short_seqs // 2 < num_seqs <= self.short_seqs and num_seqs in self.decode

    def under_load(self) -> list[Bucket]:
        """Mixed steps of as many sequences as there may be."""
        return [self._mixed(size, self.seqs[-1]) for size in self.tokens]

    def largest(self, limits: SchedulerLimits) -> list[Bucket]:
        """The largest steps there are."""
        decode = Bucket(limits.max_num_seqs, limits.max_num_seqs, "decode")
        mixed = self._mixed(limits.max_batch_tokens, limits.max_num_seqs)
        return [decode, mixed] if self.only is None else [self.only]

    @property
    def _few_seqs(self) -> int:
        """Up to how many sequences of a mixed step are all taken for prompts."""
        return self.seqs[0] if self.seqs else _FEW_SEQS

    def _mixed(self, num_tokens: int, num_seqs: int) -> Bucket:
        return _mixed(num_tokens, num_seqs, few_seqs=self._few_seqs)


_FINE_FROM: dict[StepKind, int] = {"decode": 16, "mixed": 256}
"""From how many tokens on a step that is twice as large takes much longer."""
_SMALL: dict[StepKind, tuple[int, ...]] = {"decode": (1, 8), "mixed": (16, 64)}
"""The smaller ones that are recorded at the start. One sequence alone has kernels of its own, and 2 to 8 take nearly
the same time: Qwen3-0.6B on an H200 0.92 to 1.0 ms, 0.62 for one, 1.05 for 16, and 8 of 16 1.12.
"""


def _is_coarse(bucket: Bucket) -> bool:
    """Whether a power of two is recorded at the start."""
    return bucket.num_tokens >= _FINE_FROM[bucket.kind] or bucket.num_tokens in _SMALL[bucket.kind]


_LEAST_BETWEEN = 32
"""Sequences by which steps of decoding that are recorded at the start differ; an eighth of the most, if it is more."""

_FEW_SEQS = 8
"""Most mixed steps hold a few prompts; only those that hold more pay for as many sequences as may run."""


def choose_step_sizes(
    capture_sizes: str | Sequence[int],
    *,
    has_graphs: bool,
    max_num_seqs: int,
    max_batch_tokens: int,
    max_model_len: int,
    deterministic: bool = False,
    short_seqs: int = 0,
) -> StepSizes:
    """Without graphs nothing is gained by padding, so steps keep their own size unless sizes were listed.

    Args:
        capture_sizes: ``"auto"``, or those that were asked for.
        has_graphs: whether steps are recorded.
        max_num_seqs: of a step.
        max_batch_tokens: of a step.
        max_model_len: of a sequence.
        deterministic: whether all steps are to be alike.
        short_seqs: up to how many sequences attention is cut in another way where contexts are short.
    """
    if deterministic:
        return StepSizes((), (), (), only=_mixed(max_batch_tokens, max_num_seqs, few_seqs=max_num_seqs))
    few = min(_FEW_SEQS, max_num_seqs)
    if few == max_num_seqs and max_model_len > LONG_CONTEXT:
        few = 1  # or there would be no step that keeps a long sequence apart
    seqs = tuple(sorted({few, max_num_seqs}))
    if isinstance(capture_sizes, str):
        if not has_graphs:
            return StepSizes((), (), ())
        short_seqs = short_seqs if max_model_len > SHORT_CONTEXT else 0
        return StepSizes(tuple(ladder(max_num_seqs)), _token_ladder(max_batch_tokens), seqs, short_seqs=short_seqs)
    listed = sorted(set(capture_sizes))
    return StepSizes(
        tuple(size for size in listed if size <= max_num_seqs) or (max_num_seqs,),
        tuple(size for size in listed if size <= max_batch_tokens) or (max_batch_tokens,),
        seqs,
        is_listed=True,
    )


_TOKEN_STEPS = ((64, 16), (128, 32), (256, 64), (1024, 128), (2048, 256))
_LAST_STEP = 512


def _token_ladder(largest: int) -> tuple[int, ...]:
    """Sizes of mixed steps. Coarser than for decode: up to some hundred tokens a step costs about the same.

    >>> _token_ladder(200)
    (16, 32, 48, 64, 96, 128, 192, 200)
    """
    sizes = [0]
    for end, step in _TOKEN_STEPS:
        sizes += range(sizes[-1] + step, end + 1, step)
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + _LAST_STEP)
    return (*(size for size in sizes[1:] if size < largest), largest)


@functools.lru_cache(maxsize=1024)  # every step asks for one, and a frozen value takes long to make
def _mixed(num_tokens: int, num_seqs: int, *, few_seqs: int) -> Bucket:
    """There are never more sequences than tokens."""
    num_seqs = min(num_tokens, num_seqs)
    return Bucket(num_tokens, num_seqs, "mixed", num_seqs > few_seqs and num_tokens > FEW_MIXED)


@functools.lru_cache(maxsize=64)
def _short(num_seqs: int) -> Bucket:
    return Bucket(num_seqs, num_seqs, "decode", is_short=True)


def _fit(size: int, sizes: Sequence[int]) -> int:
    place = bisect.bisect_left(sizes, size)
    return sizes[place] if place < len(sizes) else size


def free_bytes_twice(device: torch.device) -> int:
    """What is left for something that lies both on the host and on the device."""
    if device.type != "cuda":
        return free_host_bytes() // 2
    return min(free_host_bytes(), free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """What is left where a model runs."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def free_host_bytes() -> int:
    """What is left of the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
