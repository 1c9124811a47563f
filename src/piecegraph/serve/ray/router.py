"""Which replica a request goes to: the one that holds the beginning of its prompt, unless others wait for less.

Note [Who holds a beginning]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A replica keeps the beginnings of the prompts it has read, so the next prompt that begins alike is cheapest there. The
router writes down where it sent each beginning, in chunks of characters whose hashes are chained, and looks for the
longest one it knows. What a replica has dropped meanwhile is not known here: the prompt is then computed, as it would
be elsewhere. Routers of several fronts learn each for itself.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from piecegraph.serve.ray.passed_on import PassedOn

_CHUNK = 128
"""Characters: some blocks of a cache."""
_MOST_CHUNKS = 2**16
_SLACK = 8
"""Requests that the replica with the beginning may have more than another: a prompt is not worth waiting longer."""


class Beginnings:
    """Where prompts were sent, by how they begin."""

    def __init__(self) -> None:
        self._places: OrderedDict[int, Any] = OrderedDict()

    def find(self, text: str) -> Any | None:
        """The place that the longest known beginning was sent to."""
        found = None
        for chunk in _chunks(text):
            if chunk not in self._places:
                break
            self._places.move_to_end(chunk)
            found = self._places[chunk]
        return found

    def note(self, text: str, place: Any) -> None:
        for chunk in _chunks(text):
            self._places[chunk] = place
            self._places.move_to_end(chunk)
        while len(self._places) > _MOST_CHUNKS:
            self._places.popitem(last=False)


def _chunks(text: str) -> Iterator[int]:
    """A number for each beginning of whole chunks."""
    chained = 0
    for start in range(0, len(text) - _CHUNK + 1, _CHUNK):
        chained = hash((chained, text[start : start + _CHUNK]))
        yield chained


class PrefixRouter(RequestRouter):
    """See Note [Who holds a beginning]."""

    def initialize_state(self, **_: Any) -> None:
        self._beginnings = Beginnings()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica with the beginning, then two by chance, of which Ray takes the one with fewer requests."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all are candidates at the first attempt already
        others = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        holder = self._beginnings.find(_beginning(pending_request))
        known = [each for each in candidate_replicas if each.replica_id == holder]
        if not known or self._length(known[0]) > min(map(self._length, candidate_replicas)) + _SLACK:
            return [others]
        return [known, others]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A request was sent."""
        self._beginnings.note(_beginning(pending_request), replica_id)

    def _length(self, replica: RunningReplica) -> int:
        """Requests that a replica has, as far as it is known here."""
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def _beginning(request: PendingRequest | None) -> str:
    given = request.args[0] if request is not None and request.args else None
    return given.beginning if isinstance(given, PassedOn) else ""
