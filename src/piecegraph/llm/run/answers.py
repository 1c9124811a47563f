"""The event loop's side of a request: what a task reads, and how it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecegraph.errors import PiecegraphError
from piecegraph.llm.run.results import Chunk, Completion, joined


@dataclass(eq=False)
class Inbox:
    """What an event loop has been sent of one call. Only its own thread touches it."""

    num_answers: int
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    unread: dict[int, Chunk] = field(default_factory=dict)
    """By answer. Chunks that nobody reads in time are joined, so that a slow reader holds no more than its answers."""
    answers: dict[int, Completion] = field(default_factory=dict)
    error: PiecegraphError | None = None
    """What keeps all answers from coming, or one of them from coming to its end."""
    _waiter: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or len(self.answers) == self.num_answers

    def receive(self, new: Chunk | PiecegraphError) -> None:
        if isinstance(new, PiecegraphError):
            self.error = new
        elif new.finished is not None and new.finished.error is not None:
            self.error = new.finished.error  # it is raised, and is not part of a chunk
        else:
            before = self.unread.get(new.index)
            self.unread[new.index] = new if before is None else joined(before, new)
            if new.finished is not None:
                self.answers[new.index] = new.finished
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return when something new has come."""
        self._waiter = self.loop.create_future()
        await self._waiter


class Answers:
    """What comes of one call of :meth:`piecegraph.AsyncLLM.generate`.

    Iterate over it for chunks as they are generated, or await it for the list of answers; either raises the error of a
    request that cannot be served, or not to its end. A request is ended, and its memory given back before the next
    step, when the task that reads it is cancelled, by :meth:`aclose`, or once nobody holds this any more.
    """

    def __init__(self, inbox: Inbox, cancel: Callable[[], None], accepted: asyncio.Future[None] | None) -> None:
        self._inbox = inbox
        self._cancel = cancel
        self._accepted = accepted
        self._is_closed = False

    async def accepted(self) -> None:
        """Return once the request is queued. Raises why it is refused."""
        # A refusal is sent like everything else, and is received when the loop comes to it.
        await (asyncio.sleep(0) if self._accepted is None else asyncio.shield(self._accepted))
        if self._inbox.error is not None:
            raise self._inbox.error

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        inbox = self._inbox
        while not inbox.unread:
            if inbox.error is not None:
                raise inbox.error
            if inbox.is_done or self._is_closed:
                raise StopAsyncIteration
            try:
                await inbox.wait()
            except asyncio.CancelledError:
                self._close()
                raise
        return inbox.unread.pop(next(iter(inbox.unread)))

    async def _all(self) -> Sequence[Completion]:
        async for _ in self:
            pass
        return [self._inbox.answers[index] for index in sorted(self._inbox.answers)]

    def __await__(self) -> Generator[Any, None, Sequence[Completion]]:
        return self._all().__await__()

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        self._close()

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        """Nothing is waited for: a destructor runs wherever a thread happens to be."""
        if not self._is_closed:
            self._is_closed = True
            if not self._inbox.is_done:
                self._cancel()
