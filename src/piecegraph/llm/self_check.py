"""A loaded model must answer as transformers does: a few tokens are sent both ways before anything is served.

Steps that give every row are compared with transformers, row by row; then the steps that most requests take, which give
the rows with logits alone, are compared with them.

Note [How much may differ]
~~~~~~~~~~~~~~~~~~~~~~~~~~
In half precision two right answers differ by what rounding makes of them, and that depends on the model: routers on the
fence send a token to another expert, recurrences carry errors on. So the model itself is asked how much it makes of
rounding: its embeddings are jittered by half a rounding step, and its logits may differ by a multiple of what that does
to them. A model that is wrong is off by about the norm of its logits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.errors import ModelError
from piecegraph.llm.engine import Engine, Generation
from piecegraph.llm.loader import without_plugs
from piecegraph.llm.request import Request, SamplingParams
from piecegraph.plan import Decision

_LENGTHS = (7, 12)
_NEW_TOKENS = 3
_TOLERANCE = 2e-3
"""In float32, of the norm of a row of logits."""
_HALF_TOLERANCE, _MOST_TOLERANCE = 0.15, 0.6
"""In half precision: what is always allowed, and what never is."""
_ROUNDINGS = 4
"""Rounding happens in every layer, the jitter once."""


def self_check(model: Any, engine: Engine) -> Decision:
    """Generate a few tokens for two prompts and compare the logits of every step with those of one plain forward.

    Returns:
        That they are equal, and how much so.

    Raises:
        ModelError: they differ.
    """
    limits = engine.scheduler.limits
    numbers = torch.Generator().manual_seed(0)
    lengths = [min(length, max(1, limits.max_model_len - _NEW_TOKENS)) for length in _LENGTHS]
    prompts = [torch.randint(limits.vocab_size, (length,), generator=numbers).tolist() for length in lengths]
    with torch.inference_mode():
        found = _generate(engine, prompts)
        plain = _plain_logits(engine, [generation.request for generation in found])
        difference, allowed = max(_compare(model, engine, *both) for both in zip(found, plain, strict=True))
    reason = f"logits differ by {difference:.2g} of their norm, {allowed:.2g} is allowed"
    return Decision("self check", "passed", reason)


def _generate(engine: Engine, prompts: Sequence[list[int]]) -> list[Generation]:
    """Run a batch of the prompts to its end, with hidden states of all tokens."""
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True, return_hidden_states=True)
    generations = [engine.add(prompt, params, seed=0) for prompt in prompts]
    if engine.has_mrope:  # text alone would not show whether each row is used where transformers uses it
        positions = _positions_of_an_image(len(prompts[-1]))
        generations.append(engine.add(prompts[-1], params, seed=0, mrope_positions=positions))
    while engine.step():
        pass
    return generations


def _plain_logits(engine: Engine, requests: Sequence[Request]) -> list[torch.Tensor]:
    """The logits from which the same requests go on if nothing more is asked for, while their tokens are the same."""
    scheduler = engine.make_scheduler(prefix_cache=False)
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    again = [
        Request(r.id, r.tokens[: r.num_prompt].tolist(), params, mrope_positions=r.mrope_positions) for r in requests
    ]
    rows: dict[str, list[torch.Tensor]] = {request.id: [] for request in again}
    for request in again:
        scheduler.add(request)
    while plan := scheduler.schedule():
        result = engine.run(plan, every_row=False)
        for row, work in enumerate(plan.works):
            if work.samples:
                rows[work.request.id].append(result.logits[row].float().clone())
        scheduler.commit(plan, result.tokens.tolist())
    found = []
    for request, before in zip(again, requests, strict=True):
        pairs = zip(request.generated, before.generated, strict=False)
        num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        found.append(torch.stack(rows[request.id][: num_same + 1]))
    return found


def _compare(model: Any, engine: Engine, generation: Generation, plain: torch.Tensor) -> tuple[float, float]:
    """By how much of their norm the logits of a request differ from those of transformers, and what is allowed."""
    failure = generation.request.error
    if failure is not None:
        raise ModelError("PG664", f"{type(model).__name__} gives no answer", why=failure.why, hint=failure.hint)
    tokens = torch.tensor([generation.request.tokens[:-1].tolist()], device=model.device)
    with without_plugs(model):
        own = _positions(generation, model.device)
        expected = model(input_ids=tokens, use_cache=False, **own).logits[0].float()
        found = engine.forward.head(torch.cat(generation.hidden_states).to(model.device)).float()
        difference, allowed = _difference(found, expected, model.dtype), _TOLERANCE
        if model.dtype != torch.float32:
            allowed = _HALF_TOLERANCE
            if difference > allowed:
                with _jittered(model):
                    jittered = model(input_ids=tokens, use_cache=False, **own).logits[0].float()
                sensitivity = _difference(jittered, expected, model.dtype)
                allowed = min(_MOST_TOLERANCE, max(allowed, _ROUNDINGS * sensitivity))
    of_plain = _difference(plain, found[generation.request.num_prompt - 1 :][: len(plain)], model.dtype)
    if not of_plain <= allowed:
        difference = of_plain
    if not difference <= allowed:
        raise ModelError(
            "PG664",
            f"{type(model).__name__} answers differently from transformers",
            why=f"its logits differ by {difference:.1%} of their norm ({allowed:.1%} is allowed)",
            hint='run it with transformers itself, or look into it with options={"self_check": False}',
        )
    return difference, allowed


def _positions_of_an_image(num_tokens: int) -> NDArray[np.integer]:
    """As if all tokens but the first were a picture of two columns."""
    places = np.arange(num_tokens) - 1
    positions = np.stack((np.zeros_like(places), places // 2, places % 2)) + 1
    positions[:, 0] = 0
    return positions


def _positions(generation: Generation, device: torch.device) -> dict[str, torch.Tensor]:
    """The positions a request brought, continued for what it generated, as transformers takes them."""
    request = generation.request
    if request.mrope_positions is None:
        return {}
    following = np.arange(request.num_prompt, len(request.tokens) - 1) + request.mrope_delta
    positions = np.concatenate((request.mrope_positions, np.broadcast_to(following, (3, len(following)))), axis=1)
    return {"position_ids": torch.from_numpy(positions)[:, None].to(device)}


def _difference(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    # One row of many may be on the other side of a router's fence.
    return float(errors.max() if dtype == torch.float32 else errors.quantile(0.8))


@contextlib.contextmanager
def _jittered(model: Any) -> Iterator[None]:
    """Embeddings are off by half a rounding step at most. See Note [How much may differ]."""
    step = torch.finfo(model.dtype).eps / 2

    def jitter(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(output.shape, generator=torch.Generator().manual_seed(0)).to(output.device) * 2 - 1
        return (output.float() * (1 + step * noise)).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(jitter)
    try:
        yield
    finally:
        hook.remove()
