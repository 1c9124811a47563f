"""A loaded model must answer as transformers does: a few tokens are sent both ways before anything is served."""

from __future__ import annotations

from typing import Any

import torch

from piecegraph.errors import ModelError
from piecegraph.llm.engine import Engine, Generation
from piecegraph.llm.loader import without_plugs
from piecegraph.llm.request import SamplingParams
from piecegraph.plan import Decision

_LENGTHS = (7, 12)
_NEW_TOKENS = 3
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}
_HALF_TOLERANCE = 0.15
"""Of the norm of a row of logits. Rounding to half precision alone gives 6 % over 32 layers of random weights; a model
that is wrong is off by about one.
"""


def self_check(model: Any, engine: Engine) -> Decision:
    """Generate a few tokens for two prompts and compare the logits of every step with those of one plain forward.

    Returns:
        How much they differ.

    Raises:
        ModelError: they differ.
    """
    limits = engine.scheduler.limits
    numbers = torch.Generator().manual_seed(0)
    lengths = [min(length, max(1, limits.max_model_len - _NEW_TOKENS)) for length in _LENGTHS]
    prompts = [torch.randint(limits.vocab_size, (length,), generator=numbers).tolist() for length in lengths]
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True, return_hidden_states=True)
    generations = [engine.add(prompt, params, seed=0) for prompt in prompts]
    with torch.inference_mode():
        while engine.step():
            pass
    tolerance = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    error = max(_error(model, engine, generation) for generation in generations)
    if not error <= tolerance:
        raise ModelError(
            "PG664",
            f"{type(model).__name__} answers differently from transformers",
            why=f"its logits differ by {error:.1%} of their norm ({tolerance:.1%} is allowed)",
            hint='run it with transformers itself, or look into it with options={"self_check": False}',
        )
    return Decision("self check", "passed", f"logits differ by {error:.2g} of their norm, {tolerance:.2g} is allowed")


def _error(model: Any, engine: Engine, generation: Generation) -> float:
    """By how much of their norm the logits of a request differ from those of transformers."""
    request = generation.request
    if request.error is not None:
        name = type(model).__name__
        raise ModelError("PG664", f"{name} gives no answer", why=request.error.why, hint=request.error.hint)
    tokens = torch.tensor([request.tokens[:-1].tolist()], device=model.device)
    with torch.inference_mode(), without_plugs(model):
        expected = model(input_ids=tokens, use_cache=False).logits[0].float()
        found = engine.forward.head(torch.cat(generation.hidden_states).to(model.device)).float()
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    # A router on the fence may send a token to another expert in half precision: one row of many may differ.
    return float(errors.max() if model.dtype in _TOLERANCE else errors.quantile(0.8))
