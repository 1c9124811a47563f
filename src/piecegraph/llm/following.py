"""A model on several ranks: they are joined, the first one leads, and the others do what it tells them.

See Note [One schedule] for what is told. A program that ``torchrun`` starts makes the same calls on every rank; on the
others than the first, a call carries out orders until the first rank's call is over, and has its answers.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol

import torch

from piecegraph.errors import ConfigError, PiecegraphError
from piecegraph.llm.config import LLMConfig
from piecegraph.llm.ranks.group import Ranks, join
from piecegraph.llm.ranks.orders import STEP, Orders
from piecegraph.llm.run.engine import LLMEngine
from piecegraph.llm.run.generation import Generation

MakeReplica = Callable[..., Generation]
"""Makes a request of its id, tokens, parameters, seed and positions."""


class Closable(Protocol):
    """A model that can be given up."""

    def close(self) -> None:
        """Give it up."""


def join_ranks(path: str, config: LLMConfig) -> Ranks | None:
    """The ranks that run a model together; None if it is one process.

    Raises:
        ConfigError: PG681, this is not a job of so many processes.
        RankError: PG684, they were called with different arguments.
    """
    if config.tensor_parallel_size > 1 and config.device.type == "cuda":
        torch.cuda.set_device(config.device)  # NCCL asks for it
    ranks = join(config.tensor_parallel_size, config.device)
    if ranks is None:
        return None
    with together(ranks, "joining the ranks"):
        shown = {field.name: getattr(config, field.name) for field in fields(config)}
        shown |= {"device": config.device.type, "backend": str(getattr(config.backend, "__name__", config.backend))}
        ranks.check_same("the arguments of LLM", f"{path!r} {shown}")
    return ranks


def together(ranks: Ranks | None, subject: str) -> contextlib.AbstractContextManager[None]:
    """Around what ranks do together: what fails on one of them stops all."""
    return contextlib.nullcontext() if ranks is None else ranks.watch.together(subject)


def leave_at_exit(model: Closable) -> None:
    """Give up a model when the program ends, unless it ends by an error: then the others are to miss this rank."""
    found = weakref.ref(model)

    def leave() -> None:
        left = found()
        if left is not None and getattr(sys, "last_value", None) is None:
            with contextlib.suppress(PiecegraphError, RuntimeError):  # the others may be gone
                left.close()

    atexit.register(leave)


class Follower:
    """A rank that does what the first one tells it.

    Args:
        orders: where they come from.
        engine: what they are carried out on.
        make_replica: makes the requests that the first rank was asked for.
    """

    def __init__(self, orders: Orders, engine: LLMEngine, make_replica: MakeReplica) -> None:
        self._orders = orders
        self._engine = engine
        self._make_replica = make_replica

    @torch.inference_mode()
    def until(self, end: str) -> Any:
        """Carry out orders up to one of a name; what came with it.

        Raises:
            ConfigError: PG106, the first rank has closed the model.
        """
        while True:
            name, args = self._orders.hear()
            if name == end:
                return args[0] if args else None
            if name == "close":
                raise ConfigError("PG106", "the model was closed by the first rank", hint="call it on every rank alike")
            self._obey(name, args)

    def _obey(self, name: str, args: tuple[Any, ...]) -> None:
        if name == STEP:
            self._engine.step()
        elif name == "enqueue":
            self._engine.enqueue(self._make_replica(*args))
        elif name == "finish":
            self._engine.finish(*args)
        elif name == "record_idle":
            self._engine.record_idle(*args)
        else:
            assert name == "answers", name  # of a call that was not made here
