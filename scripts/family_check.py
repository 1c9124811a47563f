"""One family against transformers: a tiny model of it, run by both, every logit and every token compared."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tiny_config import VOCABULARY, tiny_config, tiny_model

import piecegraph
from piecegraph.errors import PiecegraphError
from piecegraph.llm.specs import AttentionLayer, LatentLayer, StatefulLayer

VerdictName = Literal["right", "refused", "wrong", "crashed", "not built"]

PROMPT_LENGTHS = (13, 5, 18)
NEW_TOKENS = 8
TOLERANCE = 2e-3
"""Of the norm of a row of logits, in float32."""
_LEAST_EFFECT = 0.02
"""Other tokens before it must change a row of logits by this much of its norm, or the comparison shows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyVerdict:
    """What came out for one family."""

    family: str
    verdict: VerdictName
    architecture: str = ""
    error: float | None = None
    """The largest difference of a row of logits, of the row's norm."""
    cache: str = ""
    """What the layers keep for later tokens."""
    code: str = ""
    reason: str = ""
    error_unchecked: float | None = None
    """If the self check refused it: how wrong it is without the check."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Comparison:
    error: float
    has_same_tokens: bool
    cache: str


def check_family(family: str) -> FamilyVerdict:
    """Build a tiny model of a family and compare. Never raises what the product should have refused."""
    try:
        model = tiny_model(tiny_config(family))
        _require_effect(model)
    except Exception as error:  # noqa: BLE001 - whatever stops transformers from running it is the verdict
        return FamilyVerdict(family=family, verdict="not built", reason=_in_short(error))
    about = {"family": family, "architecture": type(model).__name__}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            found = _compare(model, folder, self_check=True)
        except PiecegraphError as refusal:
            unchecked = _compare(model, folder, self_check=False).error if refusal.code == "PG664" else None
            return FamilyVerdict(
                **about, verdict="refused", code=refusal.code, reason=_reason(refusal), error_unchecked=unchecked
            )
        except Exception as error:  # noqa: BLE001 - anything but a refusal is a defect, and is told
            return FamilyVerdict(**about, verdict="crashed", reason=_in_short(error))
    tolerance = TOLERANCE if found.error <= TOLERANCE else max(TOLERANCE, _own_error(model))
    is_right = found.error <= tolerance and found.has_same_tokens
    reason = "" if is_right else f"tokens are {'equal' if found.has_same_tokens else 'different'}"
    return FamilyVerdict(
        **about, verdict="right" if is_right else "wrong", error=found.error, cache=found.cache, reason=reason
    )


def _prompts() -> list[list[int]]:
    numbers = torch.Generator().manual_seed(2)
    return [torch.randint(6, VOCABULARY, (length,), generator=numbers).tolist() for length in PROMPT_LENGTHS]


@torch.no_grad()
def _logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def _require_effect(model: Any) -> None:
    """A token must matter for what comes behind it."""
    tokens = _prompts()[1]
    logits = _logits(model, tokens)
    if logits.shape != (len(tokens), VOCABULARY) or not torch.isfinite(logits).all():
        raise ValueError(f"logits of shape {tuple(logits.shape)}, or not finite")
    before, after = logits[-1], _logits(model, [*reversed(tokens[:-1]), tokens[-1]])[-1]
    effect = float((after - before).norm() / before.norm())
    if effect < _LEAST_EFFECT:
        raise ValueError(f"the tokens before the last change its logits by {effect:.1e} only")


def _compare(model: Any, folder: str, *, self_check: bool) -> _Comparison:
    llm = piecegraph.LLM(
        folder,
        backend="eager",
        device="cpu",
        dtype=torch.float32,
        max_model_len=max(PROMPT_LENGTHS) + NEW_TOKENS,
        max_num_seqs=3,
        max_batch_tokens=8,
        memory_fraction=0.1,
        options={"block_size": 4, "self_check": self_check, "progress": False},
    )
    prompts, asked = _prompts(), {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answers = llm.generate(prompts, return_hidden_states=True, **asked)
    again = llm.generate(prompts, **asked)  # now with prefixes that are cached
    largest, is_same = 0.0, [a.token_ids for a in answers] == [a.token_ids for a in again]
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = _logits(model, [*prompt, *answer.token_ids[:-1]])
        with torch.no_grad():
            logits = llm.started.model.head(answer.hidden_states).float()
        errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        largest = max(largest, float(errors.max()))
        is_same &= expected[len(prompt) - 1 :].argmax(-1).tolist() == answer.token_ids
    return _Comparison(largest, is_same, _caches(llm))


@torch.no_grad()
def _own_error(model: Any) -> float:
    """How much transformers, token by token, differs from itself: for some layers, one token is another formula."""
    largest = 0.0
    for prompt in _prompts():
        length = len(prompt) + NEW_TOKENS - 1
        asked = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        first = torch.tensor([prompt[:1]])
        found = model.generate(first, output_logits=True, return_dict_in_generate=True, use_cache=True, **asked)
        expected = _logits(model, found.sequences[0, :-1].tolist())
        errors = (torch.cat(found.logits) - expected).norm(dim=-1) / expected.norm(dim=-1)
        largest = max(largest, float(errors.max()))
    return largest


def _caches(llm: Any) -> str:
    """What the layers keep, in words."""
    kinds = [_kind(layer) for layer in (*llm.started.model.layers, *llm.started.model.states)]
    return ", ".join(dict.fromkeys(kinds))


def _kind(layer: Any) -> str:
    if isinstance(layer, LatentLayer):
        return "latent"
    if isinstance(layer, AttentionLayer):
        reach = "window" if layer.window else "chunks" if layer.chunk else "full"
        return reach + " with sinks" * layer.has_sinks + " with softcap" * bool(layer.softcap)
    if isinstance(layer, StatefulLayer):
        return "state (module as it is)"
    return {"ConvLayer": "convolution", "DeltaLayer": "delta rule"}[type(layer).__name__]


def _reason(refusal: PiecegraphError) -> str:
    parts = [refusal.what, f"at {refusal.where}" if refusal.where else "", refusal.why]
    return ": ".join(part for part in parts if part)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
