"""What the first rank does to its engine, told to the others.

Note [One schedule]
~~~~~~~~~~~~~~~~~~~
All ranks have a scheduler, and all of them plan the same steps: a plan follows from the requests, the tokens and the
size of the cache alone, and all three are the same. So no plan is sent. What the first rank decides by itself (a
request has come, a client has gone, a text was stopped at, there is time to record something) is sent as an order;
orders reach the others in the order in which they were carried out here, since whoever gives one holds the model's
lock. An order to run a step is a header without anything behind it, as there is one for every step.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import distributed

from piecegraph.errors import RankError
from piecegraph.graph.interception import registry
from piecegraph.llm.ranks.group import Ranks

STEP = "step"


class Orders:
    """The way from the first rank to the others."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def tell(self, name: str, *args: Any) -> None:
        """Have the other ranks do something, too; nothing behind a failure, when they may be anywhere."""
        if self._ranks.watch.is_over:
            return
        payload = b"" if name == STEP else pickle.dumps((name, args))
        with self._ranks.watch.together("an order"):
            self._send(torch.tensor([len(payload), len(registry.live)]))
            if payload:
                self._send(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def hear(self) -> tuple[str, tuple[Any, ...]]:
        """What to do next; waits for it."""
        with self._ranks.watch.together("an order"):
            header = torch.zeros(2, dtype=torch.long)
            self._send(header)
            num_bytes, num_live = header.tolist()
            if not num_bytes:
                self._check_interceptions(num_live)
                return STEP, ()
            payload = torch.empty(num_bytes, dtype=torch.uint8)
            self._send(payload)
        name, args = pickle.loads(payload.numpy().tobytes())
        return name, args

    def _check_interceptions(self, num_first: int) -> None:
        """Steps with callbacks are not padded, so all ranks must have them, or none."""
        if num_first != len(registry.live):
            why = f"rank 0 has {num_first}, and rank {self._ranks.rank} has {len(registry.live)}"
            raise RankError("PG684", "interceptions differ from rank to rank", why=why)

    def _send(self, tensor: torch.Tensor) -> None:
        distributed.broadcast(tensor, group_src=0, group=self._ranks.control)
