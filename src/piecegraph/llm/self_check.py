"""A loaded model must answer as transformers does: a few tokens are sent both ways before anything is served."""

from __future__ import annotations

from typing import Any

import torch

from piecegraph.errors import ModelError
from piecegraph.llm.engine import Engine
from piecegraph.llm.loader import without_plugs
from piecegraph.llm.request import SamplingParams

_LENGTHS = (7, 12)
_NEW_TOKENS = 3
_TOLERANCE = {torch.float32: 2e-3}
_HALF_TOLERANCE = 0.06
"""Of the norm of a row of logits. A model that is wrong is off by about one."""


def self_check(model: Any, engine: Engine) -> None:
    """Generate a few tokens for two prompts and compare the hidden states of every step with those of one plain forward.

    Raises:
        ModelError: they differ.
    """
    vocab = engine.scheduler.limits.vocab_size
    numbers = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab, (length,), generator=numbers).tolist() for length in _LENGTHS]
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True, return_hidden_states=True)
    generations = [engine.add(prompt, params, seed=0) for prompt in prompts]
    with torch.inference_mode():
        while engine.step():
            pass
    tolerance = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    for generation in generations:
        request = generation.request
        tokens = torch.tensor([request.tokens[:-1].tolist()], device=model.device)
        with torch.inference_mode(), without_plugs(model):
            expected = model(input_ids=tokens, use_cache=False).logits[0].float()
            found = engine.forward.head(torch.cat(generation.hidden_states).to(model.device)).float()
        errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
        # A router on the fence may send a token to another expert in half precision: one row of many may differ.
        typical = errors.max() if model.dtype == torch.float32 else errors.quantile(0.8)
        if not bool(typical <= tolerance):
            raise ModelError(
                "PG664",
                f"{type(model).__name__} answers differently from transformers",
                why=f"its logits differ by {float(typical):.1%} of their norm ({tolerance:.1%} is allowed)",
                hint='run it with transformers itself, or look into it with options={"self_check": False}',
            )
