"""Whether a request gets the same bits whatever runs beside it: tried when a model is loaded for that.

Note [Steps that are all alike]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With ``deterministic=True`` every step is of one size, whatever is in it, so that all of them are run by the same
kernels in the same way, and what a token becomes can depend on three things only: the row it is in, the rows beside it,
and how its prompt was cut. No kernel of ours lets it: linears add up each row by itself, and attention adds up keys in
steps that follow from a token's position. Of what torch brings, row by row, that is not known. So it is tried: a
request is run alone, and again in other rows, in other parts, between others. Then every logit must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.llm.run.engine import LLMEngine
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling_params import SamplingParams

_LENGTH, _NUM_NEW = 21, 4
"""Of the request that is looked at. Its prompt is longer than a block, and than the smallest steps."""
_BESIDE = (3, 5)
"""Lengths of the prompts before it."""


def check_rows(engine: LLMEngine) -> Decision:
    """See Note [Steps that are all alike].

    Raises:
        ModelError: PG668, the request got something else beside others.
    """
    limits, cache = engine.scheduler.limits, engine.scheduler.cache
    numbers = torch.Generator().manual_seed(1)
    most = min(sum(_BESIDE) + _LENGTH + 3 * _NUM_NEW, limits.max_model_len) - _NUM_NEW
    length = max(size for size in range(1, most + 1) if cache.can_hold(size + _NUM_NEW - 1))
    prompts = [
        torch.randint(limits.vocab_size, (min(size, length),), generator=numbers).tolist()
        for size in (*_BESIDE, _LENGTH)
    ]
    with torch.inference_mode():
        alone, beside = _logits(engine, prompts[-1:]), _logits(engine, prompts)
    if not torch.equal(alone, beside):
        difference = float((alone - beside).abs().max())
        raise ModelError(
            "PG668",
            "deterministic=True cannot be kept here",
            why=f"logits of a request that runs beside others differ by {difference:.2g} from those it has alone",
            hint="choose another max_batch_tokens, dtype or backend, or leave deterministic=True out",
        )
    size = f"every step has {limits.max_batch_tokens} tokens of {limits.max_num_seqs} sequences, padding included"
    return Decision("deterministic", "on", f"{size}; logits were the same bits alone and beside others")


def _logits(engine: LLMEngine, prompts: Sequence[list[int]]) -> torch.Tensor:
    """Those that the last prompt goes on from, if all of them run together."""
    scheduler = engine.make_scheduler(prefix_cache=False)
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=_NUM_NEW, ignore_eos=True)
        scheduler.add(Request(str(index), prompt, params))
    rows = []
    while plan := scheduler.schedule():
        result = engine.run(plan, every_row=False)
        rows += [
            result.logits[row].float().clone()
            for row, work in enumerate(plan.works)
            if work.samples and work.request.id == str(len(prompts) - 1)
        ]
        scheduler.commit(plan, result.tokens.tolist())
    return torch.stack(rows)
