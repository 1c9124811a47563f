"""Several models of one job that share out the prompts of each call: data parallel.

The first rank of the first replica hands out the prompts of a call, and each replica answers a share of them. All of
them have all answers in the end. Replicas are otherwise strangers: each has its own cache, steps and recordings.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from piecegraph.errors import ConfigError, PiecegraphError
from piecegraph.llm.place import Place, Rows, closed_by_first
from piecegraph.llm.ranks.group import Ranks
from piecegraph.llm.ranks.orders import Orders
from piecegraph.llm.run.prompts import raise_first
from piecegraph.llm.run.results import Chunk, Completion
from piecegraph.llm.run.sampling_params import SamplingParams
from piecegraph.llm.running import Prompt, RunningModel

_SHARE, _REFUSE, _CLOSE = "share", "refuse", "close"


class Replica(Place):
    """One of the replicas, at its first rank.

    Args:
        running: its model.
        firsts: the first ranks of all replicas.
    """

    def __init__(self, running: RunningModel, firsts: Ranks) -> None:
        super().__init__(running)
        self._firsts, self._orders = firsts, Orders(firsts)
        self.follows = not firsts.leads
        self._lock = threading.Lock()
        """Held around a call: all replicas answer one at a time."""

    def answer(self, prompts: Sequence[Prompt], rows: Rows, raises: bool) -> list[Completion]:
        with self._lock:
            found = self._followed() if self.follows else self._lead(prompts, rows)
        if raises:
            raise_first(found)
        return found

    def stream(self, prompts: Sequence[Prompt], rows: Rows, raises: bool) -> Iterator[Chunk]:
        """An answer is one chunk, when all of them are there; on the first rank alone."""
        found = self.answer(prompts, rows, raises)
        for index, answer in enumerate(found if not self.follows else ()):
            yield Chunk(index, answer.text or "", answer.token_ids, answer, answer.logprobs)

    def follow(self) -> None:
        while True:
            name, args = self._orders.hear()
            if name == _CLOSE:
                return
            if name == _SHARE:
                self._share(*args)

    def close(self) -> None:
        if not self.follows:
            self._orders.tell(_CLOSE)

    def _lead(self, prompts: Sequence[Prompt], rows: Rows) -> list[Completion]:
        if any(isinstance(row, SamplingParams) and row.logits_processors for row in rows):
            why = "they would have to be sent to other processes"
            error = ConfigError("PG108", "logits_processors was given to replicas", why=why)
            self._orders.tell(_REFUSE, error)
            raise error
        self._orders.tell(_SHARE, list(prompts), list(rows))
        return self._share(prompts, rows)

    def _followed(self) -> list[Completion]:
        name, args = self._orders.hear()
        if name == _SHARE:
            return self._share(*args)
        refusal: PiecegraphError = args[0] if name == _REFUSE else closed_by_first()
        raise refusal

    def _share(self, prompts: Sequence[Prompt], rows: Rows) -> list[Completion]:
        """All answers, of which this replica makes its own.

        Neighbours stay together: their beginnings are often the same.
        """
        number, size = self._firsts.rank, self._firsts.size
        first, last = len(prompts) * number // size, len(prompts) * (number + 1) // size
        with self._firsts.watch.together("a replica's share of a call"):
            mine = self._running.answer(prompts[first:last], rows[first:last], raises=False, first_index=first)
            return [answer for share in self._firsts.gather(mine) for answer in share]
