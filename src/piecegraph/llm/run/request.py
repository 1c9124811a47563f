"""One request to a language model, and how far it has come.

A :class:`Request` is changed by the scheduler; the engine only says so where the text, which the scheduler does not
know, is why a request ended.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.errors import ConfigError, RequestError
from piecegraph.llm.cache.blocks import Digest
from piecegraph.llm.cache.paged import SequenceBlocks
from piecegraph.llm.run.adjustments import Adjustments
from piecegraph.llm.run.sampling_params import SamplingParams, warn_without_effect
from piecegraph.llm.run.structured import Guide

FinishReason = Literal["stop", "length", "abort", "error"]
RequestState = Literal["waiting", "running", "finished", "failed"]


class Request:
    """A prompt and the progress made on it.

    Args:
        request_id: tells requests apart until they are finished.
        prompt: token ids.
        params: how to go on from the prompt.
        seed: used if ``params`` has none.
        cache_key: requests share cached prefixes only if their keys are equal; None: never. With embeddings or
            positions of its own a request shares nothing unless it has a key, which must then tell what they were made
            from.
        input_embeds: [tokens of the prompt, hidden size], used in place of the embeddings of the prompt's ids.
        mrope_positions: [3, tokens of the prompt] (time, height, width), for models that place tokens in three
            dimensions. New tokens go on behind the largest of them. Without them, all three are those of the text.
        arrival_time: when it was asked for, by ``time.perf_counter()``; None: now.
        guide: what keeps the answer in the form that ``params`` asks for.

    Raises:
        RequestError: the prompt is empty or not made of integers.
    """

    __slots__ = (
        "adjustments",
        "arrival_time",
        "blocks",
        "cache_key",
        "digests",
        "error",
        "finish_reason",
        "finish_time",
        "first_answer",
        "guide",
        "id",
        "input_embeds",
        "max_len",
        "mrope_delta",
        "mrope_positions",
        "num_cached",
        "num_computed",
        "num_delivered",
        "num_preemptions",
        "num_prompt",
        "num_steps",
        "params",
        "seed",
        "state",
        "state_slot",
        "stop_ids",
        "stop_reason",
        "token_times",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int = 0,
        cache_key: str | None = "",
        input_embeds: torch.Tensor | None = None,
        mrope_positions: NDArray[np.integer] | torch.Tensor | None = None,
        arrival_time: float | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.id = request_id
        self.params = params
        warn_without_effect(params)
        self.tokens = _token_array(request_id, prompt)
        """The prompt and what was generated. A preempted request keeps them all, and computes them again."""
        self.num_prompt = len(self.tokens)
        self.seed = seed if params.seed is None else params.seed
        has_own_inputs = input_embeds is not None or mrope_positions is not None
        self.cache_key = None if has_own_inputs and not cache_key else cache_key
        self.input_embeds = input_embeds
        self.mrope_positions = None if mrope_positions is None else _mrope_array(self, mrope_positions)
        self.mrope_delta = 0 if self.mrope_positions is None else int(self.mrope_positions.max()) + 1 - self.num_prompt
        """What is added to the position of a new token."""
        self.max_len = self.num_prompt + params.max_new_tokens
        """Tokens in all at which the request ends; the scheduler lowers it to the model's limit."""

        self.adjustments = Adjustments(params, self.tokens) if params.adjusts else None
        if params.structured_outputs is not None and guide is None:
            why = "a request that is made by hand has no tokenizer"
            raise ConfigError("PG108", "structured_outputs was given", why=why, hint="use generate()")
        self.guide = guide
        self.first_answer: Request | None = None
        """Of the same prompt, if several answers to it were asked for at once."""
        self.stop_ids = frozenset(params.stop_token_ids)
        """Tokens that end it; the scheduler adds those of the model."""
        self.stop_reason: str | int | None = None
        """The stop text or token that ended it; None if it was the model's own token, or none."""

        self.state: RequestState = "waiting"
        self.finish_reason: FinishReason | None = None
        self.error: RequestError | None = None
        self.num_computed = 0
        """Tokens whose keys and values are in the cache."""
        self.num_delivered = 0
        """``num_computed`` at the last preemption, or before it: rows below it are not told about again."""
        self.num_cached = 0
        """Tokens found in the prefix cache when the request first ran."""
        self.num_preemptions = 0
        self.num_steps = 0
        """Steps that were committed for it."""
        self.blocks: SequenceBlocks | None = None
        self.digests: list[Digest] = []
        self.state_slot = 0
        """Where layers with a state keep the request's; 0 while it does not run."""
        self.arrival_time = time.perf_counter() if arrival_time is None else arrival_time
        self.token_times: list[float] = []
        """When each new token was known, by ``time.perf_counter()``."""
        self.finish_time: float | None = None

    @property
    def generated(self) -> list[int]:
        """The new tokens so far, the one that ended the request included."""
        return self.tokens[self.num_prompt :].tolist()

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def has_tokens_below(self, end: int) -> bool:
        """Whether all tokens are from 0 to below ``end``."""
        # Nothing may keep the view: while there is one, tokens cannot grow.
        tokens = np.frombuffer(self.tokens, np.int64)
        return bool(np.bitwise_or.reduce(tokens | (end - 1 - tokens)) >= 0)

    def end(self, reason: FinishReason, error: RequestError | None = None) -> None:
        """Write down why it has ended, and when."""
        self.state = "failed" if reason == "error" else "finished"
        self.finish_reason, self.error = reason, error
        self.finish_time = time.perf_counter()

    def __repr__(self) -> str:
        num_new = len(self.tokens) - self.num_prompt
        return f"Request({self.id!r}, {self.state}, {self.num_prompt} + {num_new} tokens, {self.num_computed} computed)"


def _token_array(request_id: str, prompt: Sequence[int]) -> array[int]:
    try:
        # An array would take bytes for its memory, and a dictionary for its keys.
        if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
            raise TypeError(f"it is a {type(prompt).__name__}")
        # The first is enough: who gives a mask gives nothing else, and a prompt has thousands of tokens.
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], bool):
            raise TypeError("it is made of True and False")
        tokens = _packed(prompt) or array("q", prompt)
    except (TypeError, OverflowError) as error:
        raise RequestError(
            "PG653", f"the prompt of request {request_id!r} is not a list of token ids", why=str(error)
        ) from error
    if not tokens:
        raise RequestError(
            "PG651",
            f"the prompt of request {request_id!r} is empty",
            why="a model needs a token to go on from",
            hint="begin with the model's token for the beginning of a text",
        )
    return tokens


def _packed(prompt: Iterable[int]) -> array[int] | None:
    """The same array in a third of the time; None where something else is among the tokens, which ``array`` refuses in
    better words.
    """
    if not isinstance(prompt, (list, tuple)):
        return None  # it can perhaps be read only once
    try:
        return array("q", struct.pack(f"{len(prompt)}q", *prompt))
    except struct.error:
        return None


def _mrope_array(request: Request, given: NDArray[np.integer] | torch.Tensor) -> NDArray[np.integer]:
    positions = given.cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    shape, why = (3, request.num_prompt), ""
    if positions.shape != shape:
        why = f"they are of shape {positions.shape}, not {shape}"
    elif not np.issubdtype(positions.dtype, np.integer):
        why = f"they are of type {positions.dtype}"
    elif positions.min() < 0:
        why = f"one of them is {positions.min()}"
    if why:
        what = f"the mrope_positions of request {request.id!r} are not positions"
        hint = "give integers that are not negative, one column for each token of the prompt"
        raise RequestError("PG653", what, why=why, hint=hint)
    return positions
