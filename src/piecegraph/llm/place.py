"""Who answers a call that is made in this process: the model by itself, or the first of several ranks that run it.

See Note [One schedule] for what is told between ranks. A program that ``torchrun`` starts makes the same calls on every
rank; on the others than the first, a call carries out orders until the first rank's call is over, and has its answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from piecegraph.base import torch_compat
from piecegraph.errors import ConfigError, PiecegraphError, RankError
from piecegraph.llm.ranks.orders import STEP, Orders
from piecegraph.llm.run.arguments import SamplingRow
from piecegraph.llm.run.results import Chunk, Completion
from piecegraph.llm.running import Prompt, RunningModel

Rows = Sequence[SamplingRow]
"""How to go on from each prompt."""


class Place:
    """Of a model that one process runs: it answers by itself.

    Args:
        running: the model, or this rank's part of it.
    """

    follows = False
    """Whether another rank answers, and this one does its part."""

    def __init__(self, running: RunningModel) -> None:
        self._running = running

    def answer(self, prompts: Sequence[Prompt], rows: Rows, raises: bool) -> list[Completion]:
        """The answers to prompts; see :meth:`RunningModel.answer`."""
        return self._running.answer(prompts, rows, raises)

    def stream(self, prompts: Sequence[Prompt], rows: Rows, raises: bool) -> Iterator[Chunk]:
        """The same as they come."""
        return self._running.stream(prompts, rows, raises)

    def follow(self) -> None:
        """Do what is told until the model is to be closed."""

    def close(self) -> None:
        """Have the others close the model. The lock is held."""


class Leader(Place):
    """The first rank of a model: it answers, and tells the others what it does.

    Args:
        running: its part of the model.
        orders: the way to the others.
        place: that of the whole model: it is alone, or a replica.
    """

    def __init__(self, running: RunningModel, orders: Orders, place: Place) -> None:
        super().__init__(running)
        self._orders, self._place = orders, place
        self.follows = place.follows
        running.started.engine.orders = orders

    def answer(self, prompts: Sequence[Prompt], rows: Rows, raises: bool) -> list[Completion]:
        with self._answering() as answers:
            answers += self._place.answer(prompts, rows, raises)
        return answers

    def stream(self, prompts: Sequence[Prompt], rows: Rows, raises: bool) -> Iterator[Chunk]:
        """Chunks are for this rank alone."""
        with self._answering():
            yield from self._place.stream(prompts, rows, raises)

    def follow(self) -> None:
        self._place.follow()

    def close(self) -> None:
        self._place.close()
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


class Follower(Place):
    """Another rank of a model: it does what the first one tells it.

    Args:
        running: its part of the model.
        orders: where they come from.
    """

    follows = True

    def __init__(self, running: RunningModel, orders: Orders) -> None:
        super().__init__(running)
        self._orders = orders

    def answer(self, prompts: Sequence[Prompt], rows: Rows, raises: bool) -> list[Completion]:
        """What the first rank answers to its prompts."""
        found: list[Completion] | PiecegraphError = self._until("answers")
        if isinstance(found, PiecegraphError):
            raise found
        return found

    def stream(self, prompts: Sequence[Prompt], rows: Rows, raises: bool) -> Iterator[Chunk]:
        """Nothing: chunks are the first rank's alone."""
        self.answer(prompts, rows, raises)
        yield from ()

    def follow(self) -> None:
        self._until("close")

    def _until(self, end: str) -> Any:
        """Carry out orders up to one of a name; what came with it.

        Raises:
            ConfigError: PG106, the first rank has closed the model.
        """
        with torch_compat.serving():
            while True:
                name, args = self._orders.hear()
                if name == end:
                    return args[0] if args else None
                if name == "close":
                    raise closed_by_first()
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
        elif name == "alter":
            engine.alter(*args)
        else:
            assert name == "answers", name  # of a call that was not made here


def closed_by_first() -> ConfigError:
    """What a call raises that the first rank did not make."""
    return ConfigError("PG106", "the model was closed by the first rank", hint="call it on every rank alike")
