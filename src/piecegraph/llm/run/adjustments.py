"""What requests add to their logits before a token is chosen: penalties, biases, tokens that may not come.

Note [Adjusted logits]
~~~~~~~~~~~~~~~~~~~~~~
A table of [rows, vocabulary] would be large, and nearly all of it would say nothing. So the host keeps a list for each
request that asks for something: a token, a scale for its logit, and a shift that is added behind. The lists of a batch
lie in one buffer one behind the other, which is padded to one of a few lengths; a step with such a buffer is recorded
for its length, and a batch that asks for nothing runs the steps that know of none. Padding goes to one more logit,
which is dropped. A list that depends on the tokens before, and not only on their number, is not known before the last
step has been read: such requests keep steps from being launched ahead (Note [Looking ahead]).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piecegraph.errors import ConfigError
from piecegraph.llm.run.sampling_params import SamplingParams


class Adjustments:
    """The list of one request, which follows its tokens.

    Args:
        params: what is asked for.
        tokens: the prompt.
    """

    def __init__(self, params: SamplingParams, tokens: array[int]) -> None:
        self._params = params
        self._num_prompt = self._num_read = len(tokens)
        self._places: dict[int, int] = {}
        self._tokens = np.zeros(64, np.int64)
        self._scale = np.ones(64, np.float32)
        self._shift = np.zeros(64, np.float32)
        self._new: set[int] = set()
        """Tokens of the answer."""
        for token, bias in params.logit_bias:
            place = self._place(token)  # which may make the list longer
            self._shift[place] = bias
        for token in dict.fromkeys(tokens) if params.repetition_penalty != 1 else ():
            place = self._place(token)
            self._scale[place] = params.repetition_penalty
        self._words = [(word[:-1], self._place(word[-1])) for word in map(_as_tokens, params.bad_words)]
        self._stops: list[int] = []

    def hold_back(self, stop_ids: Collection[int]) -> None:
        """These tokens end the request, and may not come before ``min_tokens``."""
        if self._params.min_tokens:
            self._stops = [self._place(token) for token in stop_ids]

    def entries(self, tokens: array[int], length: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Tokens, scales and shifts for the choice of a token.

        Args:
            tokens: of prompt and answer, as far as they are known.
            length: how many of them the token follows, those that only the device knows included.
        """
        if self._params.has_penalties:
            self._read(tokens)
        size = len(self._places)
        shift = self._shift[:size]
        banned = [place for before, place in self._words if _ends_with(tokens, before)]
        if length - self._num_prompt < self._params.min_tokens:
            banned += self._stops
        if banned:
            shift = shift.copy()
            shift[banned] = -math.inf
        return self._tokens[:size], self._scale[:size], shift

    def _read(self, tokens: array[int]) -> None:
        params = self._params
        for token in tokens[self._num_read :]:
            place = self._place(token)
            self._scale[place] = params.repetition_penalty
            self._shift[place] -= params.frequency_penalty
            if token not in self._new:
                self._new.add(token)
                self._shift[place] -= params.presence_penalty
        self._num_read = len(tokens)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._scale = np.concatenate((self._scale, np.ones_like(self._scale)))
            self._shift = np.concatenate((self._shift, np.zeros_like(self._shift)))
        self._tokens[place] = token
        return place


def _as_tokens(word: str | Sequence[int]) -> Sequence[int]:
    if isinstance(word, str):
        why = "a request that is made by hand has no tokenizer"
        raise ConfigError("PG108", f"bad_words holds the text {word!r}", why=why, hint="give lists of token ids")
    return word


def _ends_with(tokens: array[int], end: Sequence[int]) -> bool:
    return not end or tokens[-len(end) :].tolist() == list(end)
