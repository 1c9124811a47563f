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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from piecegraph.errors import ConfigError

if TYPE_CHECKING:
    from piecegraph.llm.run.request import SamplingParams
    from piecegraph.llm.run.step import Work

_LENGTHS = tuple(1 << power for power in (12, 16, 20, 24, 28))
"""Of buffers."""
SHORTEST = _LENGTHS[0]
"""A step with this one takes hardly longer than without, and it is enough for most batches."""


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


class Entries(NamedTuple):
    """The lists of a batch on the device, padded."""

    rows: torch.Tensor
    """int64: the row of the logits; -1 is padding."""
    tokens: torch.Tensor
    """int64."""
    scale: torch.Tensor
    """float32: a positive logit is divided by it, another multiplied."""
    shift: torch.Tensor
    """float32: added behind that."""


class EntryBuffers:
    """Static buffers of each length, allocated when they are first needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host: dict[int, Entries] = {}
        self._on_device: dict[int, Entries] = {}
        self._num_written: dict[int, int] = {}
        self._lists: list[tuple[int, NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def views(self, length: int) -> Entries:
        """The tensors of a length: the same objects every time."""
        if length not in self._on_device:
            is_cuda = self._device.type == "cuda"
            self._on_host[length] = _make_entries(length, torch.device("cpu"), pin_memory=is_cuda)
            self._on_device[length] = _make_entries(length, self._device)
            self._num_written[length] = 0
        return self._on_device[length]

    def collect(self, works: Sequence[Work]) -> int:
        """Look up the lists of a step; returns how long a buffer they take. 0: there are none."""
        self._lists = [
            (row, *work.request.adjustments.entries(work.request.tokens, work.start + work.num_tokens))
            for row, work in enumerate(works)
            if work.request.adjustments is not None and work.samples
        ]
        total = sum(len(tokens) for _, tokens, _, _ in self._lists)
        return next((each for each in _LENGTHS if each >= total), total) if total else 0

    def send(self, length: int) -> None:
        """Send the lists in the buffer of a length, without waiting for the device. All others become empty."""
        if not length and not any(self._num_written.values()):
            return  # to wait for what was sent last would hold up a step that was launched ahead
        if self._sent is not None:
            self._sent.synchronize()  # the last copy reads the memory that is written now
        self._send_all(length)
        if self._sent is not None:
            self._sent.record()

    def _send_all(self, length: int) -> None:
        for other in self._on_device:
            if other != length:
                self._send(other, 0)
        if not length:
            return
        self.views(length)
        counts = [len(tokens) for _, tokens, _, _ in self._lists]
        total = sum(counts)
        if total:
            host = [view.numpy() for view in self._on_host[length]]
            host[0][:total] = np.repeat([row for row, *_ in self._lists], counts)
            for view, parts in zip(host[1:], list(zip(*self._lists, strict=True))[1:], strict=True):
                np.concatenate(parts, out=view[:total])
        self._send(length, total)

    def _send(self, length: int, num_entries: int) -> None:
        """What was written before and is behind the new entries becomes padding: it would name rows that are gone."""
        end = max(num_entries, self._num_written[length])
        if end:
            self._on_host[length].rows[num_entries:end] = -1
            for on_device, on_host in zip(self._on_device[length], self._on_host[length], strict=True):
                on_device[:end].copy_(on_host[:end], non_blocking=True)
        self._num_written[length] = num_entries


def adjust(logits: torch.Tensor, entries: Entries) -> torch.Tensor:
    """The logits as requests want them, float32. See Note [Adjusted logits].

    Args:
        logits: [rows, vocabulary].
        entries: no two are of the same row and token.
    """
    num_rows, width = logits.shape
    flat = logits.new_empty(num_rows * width + 1, dtype=torch.float32)  # with a place for entries that are not used
    flat[:-1].view(num_rows, width).copy_(logits)
    flat[-1:].zero_()
    index = torch.where(entries.rows < 0, num_rows * width, entries.rows * width + entries.tokens)
    values = flat.index_select(0, index)
    values = torch.where(values > 0, values / entries.scale, values * entries.scale) + entries.shift
    return flat.scatter_(0, index, values)[:-1].view(num_rows, width)


def _make_entries(length: int, device: torch.device, *, pin_memory: bool = False) -> Entries:
    # Not with inference mode's tensors: buffers are made in the middle of a step, and written to by others.
    with torch.inference_mode(False):
        return Entries(
            torch.full((length,), -1, dtype=torch.int64, device=device, pin_memory=pin_memory),
            torch.zeros(length, dtype=torch.int64, device=device, pin_memory=pin_memory),
            torch.ones(length, dtype=torch.float32, device=device, pin_memory=pin_memory),
            torch.zeros(length, dtype=torch.float32, device=device, pin_memory=pin_memory),
        )
