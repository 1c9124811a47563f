"""A model on several ranks: they are joined, the first one leads, and the others do what it tells them.

See Note [One schedule] for what is told. A program that ``torchrun`` starts makes the same calls on every rank; on the
others than the first, a call carries out orders until the first rank's call is over, and has its answers.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch

from piecegraph.errors import ConfigError, PiecegraphError, RankError
from piecegraph.llm.config import LLMConfig
from piecegraph.llm.ranks.group import Ranks, join
from piecegraph.llm.ranks.orders import STEP, Orders
from piecegraph.llm.run.results import Chunk, Completion
from piecegraph.llm.running import Prompt, RunningModel


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


def take_place(ranks: Ranks | None, running: RunningModel) -> RunningModel | Leader | Follower:
    """Who answers the calls that are made in this process: the first rank leads, and the others follow it."""
    if ranks is None:
        return running
    orders = Orders(ranks)
    return Leader(orders, running) if ranks.leads else Follower(orders, running)


class Leader:
    """The rank that answers, and tells the others what it does: see Note [One schedule].

    Args:
        orders: the way to the others.
        running: its part of the model.
    """

    def __init__(self, orders: Orders, running: RunningModel) -> None:
        self._orders = orders
        self._running = running
        running.started.engine.orders = orders

    def answer(self, prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]], raises: bool) -> list[Completion]:
        """As a model alone does, for the same call on the other ranks, too."""
        with self._answering() as answers:
            answers += self._running.answer(prompts, rows, raises)
        return answers

    def stream(self, prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]], raises: bool) -> Iterator[Chunk]:
        """The same as they come. Chunks are for this rank alone."""
        with self._answering():
            yield from self._running.stream(prompts, rows, raises)

    def close(self) -> None:
        """Have the others close the model. The lock is held."""
        self._orders.tell("close")

    @contextlib.contextmanager
    def _answering(self) -> Iterator[list[Completion]]:
        """Around a call: its answers, or its error, are those of the same call on the other ranks."""
        found: list[Completion] = []
        try:
            yield found
        except RankError:
            raise
        except (PiecegraphError, GeneratorExit) as error:  # the latter: a stream was left unread
            self._tell_answers(error if isinstance(error, PiecegraphError) else [])
            raise
        self._tell_answers(found)

    def _tell_answers(self, found: list[Completion] | PiecegraphError) -> None:
        if self._running.is_open:
            with self._running.lock:
                self._orders.tell("answers", found)


class Follower:
    """A rank that does what the first one tells it.

    Args:
        orders: where they come from.
        running: its part of the model, which they are carried out on.
    """

    def __init__(self, orders: Orders, running: RunningModel) -> None:
        self._orders = orders
        self._running = running

    def answer(self, prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]], raises: bool) -> list[Completion]:
        """What the first rank answers to its prompts."""
        found: list[Completion] | PiecegraphError = self.until("answers")
        if isinstance(found, PiecegraphError):
            raise found
        return found

    def stream(self, prompts: Sequence[Prompt], rows: Sequence[dict[str, Any]], raises: bool) -> Iterator[Chunk]:
        """Nothing: chunks are the first rank's alone."""
        self.answer(prompts, rows, raises)
        yield from ()

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
        engine = self._running.started.engine
        if name == STEP:
            engine.step()
        elif name == "enqueue":
            engine.enqueue(self._running.copy_request(*args))
        elif name == "finish":
            engine.finish(*args)
        elif name == "record_idle":
            engine.record_idle(*args)
        else:
            assert name == "answers", name  # of a call that was not made here
