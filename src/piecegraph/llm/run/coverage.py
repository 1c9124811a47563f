"""Which steps are recorded when, and which recorded step serves one that is not.

Note [No request waits for a recording]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
To record a step takes as long as dozens of steps, and whoever is generating would wait for it. So a step that is not
recorded runs in the smallest recorded one that covers it: of more tokens, of more sequences, with a sampler that can do
more, with room for more adjusted logits, or with masks. The tokens are the same (Note [Sampling modes], Note [Padding
of a batch], Note [Adjusted logits], Note [Masks behind the decoder]). Where the only ones that cover it are much too
large, or there is none, it runs the compiled pieces without graphs, and that is told.

What is recorded when a model is loaded leaves no step of ``generate`` without cover but those that give every row.
What steps have missed is recorded when nothing is running: at the end of a call, behind its last token, or when it is
asked for (:meth:`piecegraph.llm.LLM.record_missing`). Never by a thread of its own: it would meet what the user runs
beside, whose random numbers and captures a recording disturbs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from piecegraph.llm.run.adjustment_buffers import SHORTEST
from piecegraph.llm.run.model_step import StepKey
from piecegraph.llm.run.sampling import SamplingMode
from piecegraph.llm.run.sizing import StepSizes
from piecegraph.llm.run.step import Bucket

_POWER: dict[SamplingMode, int] = {"greedy": 0, "plain": 1, "truncated": 2}
"""What a sampler can do; each does what those before it can, and takes longer for every sequence."""
_MOST_TIMES = 4
"""So many times the tokens of a step a recorded one may have: without graphs it would take less time than that."""
_CHEAP_TOKENS = 256
"""Up to here a step takes about the same time whatever its size."""


def covers(recorded: StepKey, wanted: StepKey) -> bool:
    """Whether a recorded step may run in the place of another."""
    mine, theirs = recorded.bucket, wanted.bucket
    return (
        mine.kind == theirs.kind
        and mine.is_short <= theirs.is_short
        and theirs.num_seqs <= mine.num_seqs
        and theirs.num_tokens <= mine.num_tokens <= max(_CHEAP_TOKENS, _MOST_TIMES * theirs.num_tokens)
        and _POWER[wanted.sampling] <= _POWER[recorded.sampling]
        and wanted.num_adjusted <= recorded.num_adjusted
        and wanted.has_masks <= recorded.has_masks
        and (recorded.takes_embeds, recorded.every_row) == (wanted.takes_embeds, wanted.every_row)
    )


def best_cover(wanted: StepKey, recorded: Iterable[StepKey]) -> StepKey | None:
    """The recorded step that serves another one soonest."""

    def cost(key: StepKey) -> tuple[int, int, bool, bool]:
        bucket = key.bucket
        # To draw for a sequence takes up to about as long as two tokens of a small model.
        tokens = bucket.num_tokens + _POWER[key.sampling] * bucket.num_seqs
        return tokens, key.num_adjusted, key.has_masks, not bucket.is_short

    return min((key for key in recorded if covers(key, wanted)), key=cost, default=None)


def first_keys(sizes: StepSizes) -> list[StepKey]:
    """What is recorded in any case: see Note [No request waits for a recording]."""
    if sizes.only is not None:  # all steps are to be alike, also those that give every row
        plain = StepKey(sizes.only, "truncated", num_adjusted=SHORTEST, has_masks=True)
        return [StepKey(sizes.only, "greedy"), plain, replace(plain, every_row=True)]
    at_start = sizes.at_start()
    candidates = [_masked(bucket) for bucket in at_start]
    masked = [key for key in candidates if key.bucket.kind == "decode"]
    for bucket in sorted(sizes.all(), key=lambda bucket: (bucket.num_tokens, bucket.num_seqs), reverse=True):
        if best_cover(_masked(bucket), masked) is None:
            masked.append(best_cover(_masked(bucket), candidates) or _masked(bucket))
    # All but the first of them cost little: see Note [Samplers behind one recording].
    return [key for bucket in at_start for key in _samplers(bucket)] + masked


def later_keys(sizes: StepSizes) -> list[list[StepKey]]:
    """What is recorded if there is time, in the order in which it is needed.

    Under load mixed steps have many sequences, and a large step is padded by most tokens. Then come mixed steps of a
    few sequences.
    """
    first, buckets = set(first_keys(sizes)), sizes.all() if sizes.only is None else []
    groups = (
        [bucket for bucket in buckets if not _is_for_few(bucket, sizes)],
        [bucket for bucket in buckets if _is_for_few(bucket, sizes)],
    )
    return [[key for bucket in group for key in _samplers(bucket) if key not in first] for group in groups]


def recorded_with(key: StepKey) -> list[StepKey]:
    """A step and those that cost little beside it: see Note [Samplers behind one recording]."""
    beside = (replace(each, takes_embeds=key.takes_embeds, every_row=key.every_row) for each in _samplers(key.bucket))
    return list(dict.fromkeys((*beside, key)))


def _samplers(bucket: Bucket) -> tuple[StepKey, ...]:
    """A step with each way to choose tokens: what one could do for the others takes longer than theirs."""
    return *(StepKey(bucket, sampling) for sampling in _POWER), _sampled(bucket)


def _sampled(bucket: Bucket) -> StepKey:
    """The step that can draw tokens in every way."""
    return StepKey(bucket, "truncated", num_adjusted=SHORTEST)


def _masked(bucket: Bucket) -> StepKey:
    """The same, from those that masks allow."""
    return replace(_sampled(bucket), has_masks=True)


def _is_for_few(bucket: Bucket, sizes: StepSizes) -> bool:
    """Whether it is a mixed step of a few sequences."""
    return bucket.kind == "mixed" and bucket.num_seqs < min(bucket.num_tokens, sizes.seqs[-1])
