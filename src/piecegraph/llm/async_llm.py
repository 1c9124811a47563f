"""A language model for asyncio: :class:`AsyncLLM`, the engine of :class:`~piecegraph.LLM` on a thread of its own.

Note [Orders to the engine]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Event loops only hand orders in and take chunks out. Between two steps the engine's thread carries out what it was
ordered, ends what is late, and lets in what waits; behind a step it sends all that is new to an event loop in one call,
as waking a loop costs more than a token. Without requests it waits for an order, and for no time-out. To give an order
takes no lock: a destructor may have to, wherever a thread happens to be.

Note [Priorities]
~~~~~~~~~~~~~~~~~
What waits is kept here, by priority: the scheduler's own queue is strictly in order of arrival, see Note [Arrival
order]. It is given what may run at once, and a quarter of that to wait for a place: it plans steps ahead, and has to
know who comes in the place of those that end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch

from piecegraph.base.coerce import as_integer, as_real
from piecegraph.errors import ConfigError, ModelError, PiecegraphError, RankError, RequestError
from piecegraph.llm.llm import LLM, Conversation
from piecegraph.llm.run.answers import Answers, Inbox
from piecegraph.llm.run.arguments import SamplingArguments, sampling_rows
from piecegraph.llm.run.generation import Generation
from piecegraph.llm.run.prompts import name_prompt, tokens_of
from piecegraph.llm.run.request import SamplingParams
from piecegraph.llm.run.results import Chunk
from piecegraph.llm.running import Prompt, chunk_of

logger = logging.getLogger(__name__)

_FEW = 16
_SICK_AFTER = 3
"""Steps that fail one behind the other: what is wrong does not go away by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a model is."""

    num_running: int
    num_waiting: int
    cache_usage: float
    """The share of the cache's blocks that requests hold."""
    num_failed_steps: int
    is_healthy: bool
    """Whether the engine's thread lives, and not all of its last steps failed."""


@dataclass(eq=False)
class _Call:
    """One prompt on its way. Only the engine's thread touches it once it is ordered."""

    priority: int
    number: int
    deadline: float | None
    inbox: Inbox
    places: list[_Place] = field(default_factory=list)
    """One for each answer."""
    is_cancelled: bool = False


@dataclass(eq=False)
class _Place:
    """One answer of a call."""

    call: _Call
    index: int
    generation: Generation
    has_begun: bool = False
    """Whether it waits no more: the scheduler has it, or it has ended."""


class AsyncLLM:
    """A language model that serves requests of asyncio, many at once.

    Args:
        model: as for :class:`~piecegraph.LLM`; or an LLM, which other threads may go on calling.
        max_queue: requests that wait at most. Further ones are refused (PG658).
        records_idle: record steps that others have missed while there are no requests, one at a time. A recording
            disturbs what other threads run on the device meanwhile.
        **arguments: those of :class:`~piecegraph.LLM`.

    Example:
        async with piecegraph.AsyncLLM("path/to/model") as llm:
            async for chunk in llm.generate("The capital of France is", max_new_tokens=8):
                print(chunk.text, end="")
    """

    def __init__(
        self,
        model: LLM | str | os.PathLike[str],
        *,
        max_queue: int = 1024,
        records_idle: bool = False,
        **arguments: Any,
    ) -> None:
        self.max_queue = _max_queue(max_queue)
        if isinstance(model, LLM) and arguments:
            why = "the model is loaded already"
            raise ConfigError("PG101", f"{min(arguments)} was given with an LLM", why=why)
        self.llm = model if isinstance(model, LLM) else LLM(model, **arguments)
        if self.llm.follows:
            why = "another rank takes requests"
            raise ConfigError("PG681", "this rank cannot serve", why=why, hint="call follow() of an LLM on this rank")
        if self.llm.replicas is not None:
            why = "replicas of one job answer calls of generate, and not requests as they come"
            hint = "start a server for each, or let Ray Serve do it: docs/serve.md"
            raise ConfigError("PG681", f"data_parallel_size is {self.llm.replicas.size}", why=why, hint=hint)
        self._owns_llm = not isinstance(model, LLM)
        self._records_idle = records_idle
        self._numbers = itertools.count()
        self._tokenizing = ThreadPoolExecutor(1, "piecegraph-tokenizer")
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        """Held for a moment by those who write what follows."""
        self._is_open = True
        self._num_accepted = 0
        """Answers, in all."""
        # All that follows is written by the engine's thread alone.
        self.num_failed_steps = 0
        self._failed_in_a_row = 0
        self._num_begun = 0
        """Of the accepted ones, those that wait no more."""
        self._calls: set[_Call] = set()
        self._waiting: list[tuple[int, int, int, _Place]] = []
        """A heap: priority, number of the call, number of the answer. See Note [Priorities]."""
        self._deadlines: list[tuple[float, int, _Call]] = []
        self._in_engine: dict[str, _Place] = {}
        self._outbox: deque[tuple[_Call, Chunk]] = deque()
        """Other threads append to it, too: a step is run for everybody's requests, by whoever has the lock."""
        self._ends_all = self._has_left = False
        self._thread = threading.Thread(target=self._serve, name="piecegraph-engine", daemon=True)
        self._thread.start()

    # -- in event loops

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        stream: bool = True,
        **sampling: Unpack[SamplingArguments],
    ) -> Answers:
        """Go on from a prompt. Call it where an event loop is running.

        Args:
            prompt: a text or a list of token ids.
            sampling_params: how, in one value; or by name, as for :meth:`piecegraph.LLM.generate`.
            priority: requests with a lower number are let in first, those with the same number as they come.
            timeout_s: seconds from now after which the request ends with an error (PG659).
            stream: False to have each answer in one chunk, at its end: for whoever awaits them, which costs less.
            **sampling: in the place of ``sampling_params``.

        Raises:
            RequestError: PG658, as many requests wait as may.
            ConfigError: an argument is wrong, or the model was closed.
        """
        (row,) = sampling_rows(1, sampling_params, sampling)
        params, now = SamplingParams(**row), time.perf_counter()
        deadline = None if timeout_s is None else now + _seconds(timeout_s)
        call = _Call(_priority(priority), next(self._numbers), deadline, Inbox(params.n))
        self._accept(params.n)
        prepare = functools.partial(self._prepare, call, prompt, params, now, is_streamed=stream)
        if isinstance(prompt, str) or params.structured_outputs is not None:  # tokenizers and grammars take their time
            accepted = call.inbox.loop.run_in_executor(self._tokenizing, prepare)
            return Answers(call.inbox, functools.partial(self._order, self._end, call), accepted)
        prepare()
        return Answers(call.inbox, functools.partial(self._order, self._end, call), None)

    async def chat_prompt(self, conversation: Conversation, **values: Any) -> list[int]:
        """The same as :meth:`piecegraph.LLM.chat_prompt`, which takes its time."""
        loop = asyncio.get_running_loop()
        read = functools.partial(self.llm.chat_prompt, conversation, **values)
        return await loop.run_in_executor(self._tokenizing, read)

    async def tokens_of(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text."""
        loop = asyncio.get_running_loop()
        read = functools.partial(tokens_of, text, self.llm.tokenizer, add_special_tokens=add_special_tokens)
        return list(await loop.run_in_executor(self._tokenizing, read))

    def load(self) -> Load:
        """How busy the model is."""
        scheduler = self.llm.started.engine.scheduler
        return Load(
            num_running=len(scheduler.running),
            num_waiting=self._num_waiting,
            cache_usage=scheduler.cache.usage,
            num_failed_steps=self.num_failed_steps,
            is_healthy=self._thread.is_alive() and self._failed_in_a_row < _SICK_AFTER,
        )

    async def close(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Accept no more requests, let the accepted ones end, and close the model, unless it was given as an LLM.

        Args:
            drain: False ends them now, with ``finish_reason="abort"``.
            timeout_s: seconds after which those that are left are ended like that.
        """
        with self._mutex:
            self._is_open = False
        self._order(_wake)
        if drain:
            await asyncio.to_thread(self._thread.join, timeout_s)
        self._order(self._end_all)
        await asyncio.to_thread(self._thread.join)
        self._tokenizing.shutdown()
        if self._owns_llm:
            await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=kind is None)

    @property
    def _num_waiting(self) -> int:
        """Answers that have no place in the batch, those whose prompt is still read included."""
        return self._num_accepted - self._num_begun + self.llm.started.engine.scheduler.num_waiting

    def _order(self, function: Callable[..., None], *args: Any) -> None:
        """Have the engine's thread call something before its next step. See Note [Orders to the engine]."""
        self._orders.put(functools.partial(function, *args))

    def _accept(self, num_answers: int) -> None:
        with self._mutex:
            if not self._is_open:
                raise ConfigError("PG106", "the model was called after close()", hint="load it again")
            num_waiting = self._num_waiting
            if num_waiting + num_answers > self.max_queue:
                why = f"there are {num_waiting} waiting, and max_queue is {self.max_queue}"
                raise RequestError("PG658", "the queue is full", why=why, hint="ask again later")
            self._num_accepted += num_answers

    def _prepare(
        self, call: _Call, prompt: Prompt, params: SamplingParams, arrival_time: float, *, is_streamed: bool
    ) -> None:
        """Read a prompt and have it queued, or tell why it is refused. In its event loop or the tokenizer's thread."""
        try:
            generations = self.llm.running.prepare(
                prompt,
                params,
                on_new=lambda index: functools.partial(self._take_new, call, index),
                is_streamed=is_streamed,
                arrival_time=arrival_time,
            )
            self.llm.started.engine.scheduler.check_fits(generations[0].request)
        except (RequestError, ConfigError, ModelError) as error:
            with self._mutex:
                self._num_accepted -= params.n
            self._order(_wake)  # it may be the last that is waited for
            _send(call.inbox.loop, [(call.inbox, name_prompt(error, None))])
            return
        call.places = [_Place(call, index, generation) for index, generation in enumerate(generations)]
        self._order(self._begin, call)
        if self._has_left:
            _send(call.inbox.loop, [(call.inbox, _gone())])

    # -- in the engine's thread

    def _serve(self) -> None:
        if self.llm.config.device.type == "cuda":
            torch.cuda.set_device(self.llm.config.device)
        try:
            with torch.inference_mode(), contextlib.suppress(ConfigError):  # others have closed the model
                while self._carry_out_orders():
                    with self.llm.lock:
                        self._end_late()
                        self._let_in()
                        self._step()
                    self._send_new()
        finally:
            self._leave()

    def _carry_out_orders(self) -> bool:
        """Carry out what was ordered, and wait for an order where there is nothing else to do. False if there never
        will be.
        """
        while self._calls or self._is_open or self._num_begun < self._num_accepted:
            while not self._calls and self._orders.empty() and self._record_idle():
                pass
            try:
                order = self._orders.get(block=not self._calls)
            except queue.Empty:
                return True
            order()
            self._send_new()
        return False

    def _record_idle(self) -> bool:
        """Record one step that is missing; False if there is no other."""
        if not self._records_idle:
            return False
        try:
            return self.llm.record_missing(seconds=0) > 0
        except Exception:
            logger.exception("a step could not be recorded")
            self._records_idle = False
            return False

    def _begin(self, call: _Call) -> None:
        if call.is_cancelled:  # before its prompt was read
            self._num_begun += len(call.places)
            return
        self._calls.add(call)
        for place in call.places:
            heapq.heappush(self._waiting, (call.priority, call.number, place.index, place))
        if call.deadline is not None:
            heapq.heappush(self._deadlines, (call.deadline, call.number, call))
        if self._ends_all:
            self._end(call)

    def _end(self, call: _Call, error: RequestError | None = None) -> None:
        """End what is left of a call: with an error, or because nobody wants it any more."""
        call.is_cancelled = True
        if call not in self._calls:
            return
        with self.llm.lock:
            engine = self.llm.started.engine
            for place in call.places:
                if not place.has_begun:
                    self._end_waiting(place, error)
                elif error is not None:
                    engine.fail(place.generation, error)
                else:
                    engine.abort(place.generation)

    def _end_waiting(self, place: _Place, error: RequestError | None) -> None:
        place.generation.request.end("abort" if error is None else "error", error)
        place.has_begun = True
        self._num_begun += 1
        self._take_new(place.call, place.index, place.generation, "", [])

    def _end_all(self) -> None:
        """End all calls, and those whose prompt is still being read when they come."""
        self._ends_all = True
        for call in tuple(self._calls):
            self._end(call)

    def _end_late(self) -> None:
        now = time.perf_counter()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, call = heapq.heappop(self._deadlines)
            self._end(call, RequestError("PG659", "the request is not done in time", why="its timeout_s has passed"))

    def _let_in(self) -> None:
        """See Note [Priorities]."""
        engine = self.llm.started.engine
        most = engine.scheduler.limits.max_num_seqs
        room = most + most // 4 - engine.scheduler.num_unfinished
        while self._waiting and room > 0:
            *_, place = heapq.heappop(self._waiting)
            if place.has_begun:
                continue  # it ended while it waited
            try:
                engine.enqueue(place.generation)
            except RequestError as error:  # others have the cache
                self._end_waiting(place, error)
                continue
            place.has_begun = True
            self._num_begun += 1
            self._in_engine[place.generation.request.id] = place
            room -= 1

    def _step(self) -> None:
        engine = self.llm.started.engine
        try:
            has_run = engine.step()
        except RankError as error:
            assert self.llm.ranks is not None
            self.llm.ranks.watch.end_process(error)
        except Exception as error:  # whatever it is, it is told to those it happened to
            self.num_failed_steps += 1
            self._failed_in_a_row += 1
            logger.exception("a step failed")
            ours = [place for each in engine.failed if (place := self._in_engine.get(each.request.id)) is not None]
            why = f"{type(error).__name__}: {error}"
            for place in ours or tuple(self._in_engine.values()):
                engine.fail(place.generation, RequestError("PG650", "a step with the request failed", why=why))
        else:
            self._failed_in_a_row = 0 if has_run else self._failed_in_a_row

    def _take_new(self, call: _Call, index: int, generation: Generation, text: str, tokens: list[int]) -> None:
        chunk = chunk_of(index, generation, text, tokens)
        if chunk is not None:
            self._outbox.append((call, chunk))

    def _send_new(self) -> None:
        """Send what is new to where it is read: to each event loop in one call."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[_Call, Chunk]]] = {}
        while self._outbox:
            call, chunk = self._outbox.popleft()
            news.setdefault(call.inbox.loop, []).append((call, chunk))
            if chunk.finished is not None:
                self._forget(call.places[chunk.index])
        for loop, new in news.items():
            if not _send(loop, [(call.inbox, chunk) for call, chunk in new]):
                for call, _ in new:
                    self._end(call)

    def _forget(self, place: _Place) -> None:
        """An answer has come to its end."""
        self._in_engine.pop(place.generation.request.id, None)
        if all(each.generation.is_done for each in place.call.places):
            self._calls.discard(place.call)
        # Those that have ended are taken out of the heaps together: each by itself would take a search.
        if len(self._waiting) > 2 * (self._num_accepted - self._num_begun) + _FEW:
            self._waiting = [each for each in self._waiting if not each[-1].has_begun]
            heapq.heapify(self._waiting)
        if len(self._deadlines) > 2 * len(self._calls) + _FEW:
            self._deadlines = [each for each in self._deadlines if each[-1] in self._calls]
            heapq.heapify(self._deadlines)

    def _leave(self) -> None:
        """Tell those that are left that nothing will come. There are none, unless the thread fails."""
        self._has_left = True
        with self._mutex:
            self._is_open = False
        while not self._orders.empty():
            with contextlib.suppress(ConfigError):  # others have closed the model
                self._orders.get()()
        self._send_new()
        for call in self._calls:
            _send(call.inbox.loop, [(call.inbox, _gone())])
        with contextlib.suppress(ConfigError):
            self._end_all()


def _wake() -> None:
    """An order to look around."""


def _send(loop: asyncio.AbstractEventLoop, new: Sequence[tuple[Inbox, Chunk | PiecegraphError]]) -> bool:
    """Have an event loop receive something; False if it is closed, with all that was waiting in it."""
    try:
        loop.call_soon_threadsafe(_receive, new)
    except RuntimeError:
        return False
    return True


def _receive(new: Sequence[tuple[Inbox, Chunk | PiecegraphError]]) -> None:
    for inbox, each in new:
        inbox.receive(each)


def _gone() -> RequestError:
    return RequestError("PG650", "the engine has ended", why="its thread failed, or the model was closed")


def _max_queue(given: Any) -> int:
    found = as_integer(given)
    if found is None or found < 1:
        raise ConfigError("PG101", f"max_queue is {given!r}", why="it must be a positive integer")
    return found


def _priority(given: Any) -> int:
    found = as_integer(given)
    if found is None:
        raise ConfigError("PG101", f"priority is {given!r}", why="it must be an integer")
    return found


def _seconds(given: Any) -> float:
    found = as_real(given)
    if found is None or not found > 0:
        raise ConfigError("PG101", f"timeout_s is {given!r}", why="it must be a positive number")
    return found
