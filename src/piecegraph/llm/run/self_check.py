"""A loaded model must answer as transformers does: a few tokens are sent both ways before anything is served.

Steps that give every row are compared with transformers, row by row; then the steps that most requests take, which give
the rows with logits alone, are compared with them.

How much may differ: see Note [How much may differ] in :mod:`piecegraph.llm.run.agreement`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.base.plan import Decision
from piecegraph.errors import ModelError
from piecegraph.llm.model.loader import without_plugs
from piecegraph.llm.model.rotations import are_for_short, own_rotations
from piecegraph.llm.run.agreement import Errors, Finding, findings, jittered, row_errors, widened
from piecegraph.llm.run.engine import LLMEngine
from piecegraph.llm.run.generation import Generation
from piecegraph.llm.run.request import Request
from piecegraph.llm.run.sampling import rows_at_once
from piecegraph.llm.run.sampling_params import SamplingParams

_NEW_TOKENS = 8
_FIRST_LEN, _SECOND_LEN, _LONG_LEN = 6, 18, 250
"""Of prompts. The second is longer than a block; a long one in its place is longer than windows of up to 242 tokens,
and has the kernels for many rows. A step of both is of a size that is recorded for others, too: 32 tokens, also with
the first once more, or 256."""

_PROMPTS, _BEYOND, _STEPS, _PLAIN = "prompts", "prompts behind a window", "decode steps", "steps without hidden states"


class BrokenModelError(ModelError):
    """The model itself is at fault: transformers has no answer either."""


def self_check(model: Any, engine: LLMEngine) -> Decision:
    """Generate a few tokens for two prompts and compare the logits of every step with those of one plain forward.

    Returns:
        That they are equal, and how much so.

    Raises:
        ModelError: they differ.
    """
    limits = engine.scheduler.limits
    numbers = torch.Generator().manual_seed(0)
    lengths, num_new = _choose_lengths(engine, has_others=model.device.type == "cuda" and model.dtype.itemsize == 2)
    prompts = [torch.randint(limits.vocab_size, (length,), generator=numbers).tolist() for length in lengths]
    with torch.inference_mode():
        found = _generate(engine, prompts, num_new)
        plain = _plain_logits(engine, [generation.request for generation in found])
        worst = max(_judge(model, engine, found, plain), key=lambda finding: finding.severity)
    if worst.severity > 1:
        raise ModelError(
            "PG664",
            f"{type(model).__name__} answers differently from transformers",
            why=f"its logits of {worst.kind} differ by {worst.difference:.1%} of their norm"
            f" ({worst.allowed:.1%} is allowed)",
            hint='run it with transformers itself, or look into it with options={"self_check": False}',
        )
    reason = f"logits differ by {worst.difference:.2g} of their norm, {worst.allowed:.2g} is allowed"
    is_long = not are_for_short(model, limits.max_model_len)
    return Decision("self check", "passed", reason + "; both rotated as long sequences" * is_long)


def _choose_lengths(engine: LLMEngine, *, has_others: bool) -> tuple[list[int], int]:
    """Lengths of the prompts, and how many tokens to generate: a small cache may not hold what we would like.

    Args:
        engine: what runs the model.
        has_others: whether steps of some hundred tokens may run other kernels than those of a few.
    """
    limits, reach = engine.scheduler.limits, _smallest_reach(engine)
    is_long = has_others or (reach is not None and _SECOND_LEN < reach + _NEW_TOKENS <= _LONG_LEN)
    wanted = (_FIRST_LEN, _LONG_LEN if is_long else _SECOND_LEN)
    # The last token is never computed, so it needs no room. A cache has room for one token at least.
    most = min(wanted[-1] + _NEW_TOKENS, limits.max_model_len) - 1
    room = max(size for size in range(1, most + 1) if engine.scheduler.cache.can_hold(size))
    num_new = min(_NEW_TOKENS, room // 2 + 1)
    return [min(length, room + 1 - num_new) for length in wanted], num_new


def _smallest_reach(engine: LLMEngine) -> int | None:
    """How far back the layers see that see least."""
    groups = engine.scheduler.cache.groups
    return min((reach for group in groups for reach in (group.window, group.chunk) if reach), default=None)


def _generate(engine: LLMEngine, prompts: Sequence[list[int]], num_new: int) -> list[Generation]:
    """Run a batch of the prompts to its end, with hidden states of all tokens."""
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True, return_hidden_states=True)
    # Some kernels are for one sequence alone: the others end before the last one does.
    fewer = replace(params, max_new_tokens=(num_new + 1) // 2)
    generations = []
    if engine.has_mrope:  # text alone would not show whether each row is used where transformers uses it
        positions = _positions_of_an_image(len(prompts[0]))
        generations.append(engine.add(prompts[0], fewer, seed=0, mrope_positions=positions))
    generations += [engine.add(prompt, fewer, seed=0) for prompt in prompts[:-1]]
    generations.append(engine.add(prompts[-1], params, seed=0))
    while engine.step():
        pass
    return generations


def _plain_logits(engine: LLMEngine, requests: Sequence[Request]) -> list[torch.Tensor]:
    """The logits from which the same requests go on if nothing more is asked for, while their tokens are the same."""
    scheduler = engine.make_scheduler(prefix_cache=False)
    again = [
        Request(
            request.id,
            request.tokens[: request.num_prompt].tolist(),
            replace(request.params, return_hidden_states=False),
            mrope_positions=request.mrope_positions,
        )
        for request in requests
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


def _judge(
    model: Any, engine: LLMEngine, generations: Sequence[Generation], plain: Sequence[torch.Tensor]
) -> list[Finding]:
    """How much the rows of each kind differ from those of transformers, and how much may."""
    reach, length = _smallest_reach(engine), engine.scheduler.limits.max_model_len
    with _as_transformers(model, length):
        expected = [_reference(model, generation) for generation in generations]
    errors = _together(
        _in_kinds(_errors(engine, _hidden(generation), logits), generation, reach)
        | {_PLAIN: _plain_errors(engine, generation, rows)}
        for generation, logits, rows in zip(generations, expected, plain, strict=True)
    )
    found = findings(errors, model.dtype)
    if model.dtype.itemsize > 2 or all(finding.severity <= 1 for finding in found):
        return found
    with _as_transformers(model, length), jittered(model):
        disturbed = [_reference(model, generation) for generation in generations]
    of_rounding = _together(
        _in_kinds(row_errors(other, logits), generation, reach)
        for generation, other, logits in zip(generations, disturbed, expected, strict=True)
    )
    return widened(found, of_rounding)


@contextlib.contextmanager
def _as_transformers(model: Any, max_model_len: int) -> Iterator[None]:
    """Run a model as transformers would; but not rotate a few tokens as such where they are rotated as long ones."""
    is_comparable = are_for_short(model, max_model_len)
    with without_plugs(model), own_rotations(model) if is_comparable else contextlib.nullcontext():
        yield


def _reference(model: Any, generation: Generation) -> torch.Tensor:
    """What transformers makes of a request and its answer."""
    failure, known = generation.request.error, generation.request.tokens.tolist()
    tokens = torch.tensor([known[:-1] if failure is None else known], device=model.device)
    positions = _positions(generation, tokens.shape[1], model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, **positions).logits[0]
    if failure is not None:
        what = f"{type(model).__name__} gives no answer"
        if bool(logits.isfinite().all()):
            raise ModelError("PG664", what, why=f"{failure.why}, where transformers does not", hint=failure.hint)
        hint = "look for weights that are not finite, or too large for the dtype"
        raise BrokenModelError("PG664", what, why=f"{failure.why}, and so does transformers", hint=hint)
    return logits


def _in_kinds(errors: torch.Tensor, generation: Generation, reach: int | None) -> dict[str, torch.Tensor]:
    end = generation.request.num_prompt
    seen = end if reach is None else min(reach, end)
    return {_PROMPTS: errors[:seen], _BEYOND: errors[seen:end], _STEPS: errors[end:], _PLAIN: errors[end - 1 :]}


def _together(parts: Iterable[Errors]) -> Errors:
    """The rows of all requests."""
    kept = list(parts)
    return {kind: torch.cat([part[kind] for part in kept]) for kind in kept[0]}


def _hidden(generation: Generation) -> torch.Tensor:
    return torch.cat(generation.hidden_states)


def _errors(engine: LLMEngine, hidden: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of the logits of hidden states: not of all at once, as a vocabulary is wide."""
    size = rows_at_once(expected.shape[-1])
    pairs = zip(hidden.split(size), expected.split(size), strict=True)
    return torch.cat([row_errors(engine.forward.step.head(rows.to(logits.device)), logits) for rows, logits in pairs])


def _plain_errors(engine: LLMEngine, generation: Generation, plain: torch.Tensor) -> torch.Tensor:
    hidden = _hidden(generation)[generation.request.num_prompt - 1 :][: len(plain)]
    return _errors(engine, hidden, plain)


def _positions_of_an_image(num_tokens: int) -> NDArray[np.integer]:
    """As if all tokens but the first were a picture of two columns."""
    places = np.arange(num_tokens) - 1
    positions = np.stack((np.zeros_like(places), places // 2, places % 2)) + 1
    positions[:, 0] = 0
    return positions


def _positions(generation: Generation, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The positions a request brought, continued for what it generated, as transformers takes them."""
    request = generation.request
    if request.mrope_positions is None:
        return {}
    following = np.arange(request.num_prompt, length) + request.mrope_delta
    positions = np.concatenate((request.mrope_positions, np.broadcast_to(following, (3, len(following)))), axis=1)
    return {"position_ids": torch.from_numpy(positions)[:, None].to(device)}
