"""A language model for asyncio: :class:`AsyncLLM`, the engine of :class:`~piecegraph.LLM` on a thread of its own.

Note [Orders to the engine]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Event loops only hand orders in and take tokens out, whose text they make by themselves (Note [Text is made where it
is read]). Between two steps the engine's thread carries out what it was ordered, ends what is late, and lets in what
waits; behind a step it looks which streams have grown, and sends all that is new to an event loop, or to another
process, in one call: to wake it costs more than a token. Without requests it waits for an order, and for no time-out.
To give an order takes no lock: a destructor may have to, wherever a thread happens to be.

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
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from piecegraph.base.coerce import as_integer
from piecegraph.errors import ConfigError, PiecegraphError, RankError, RequestError
from piecegraph.llm.asking import Asked, Asking
from piecegraph.llm.llm import LLM
from piecegraph.llm.run.answers import Inbox
from piecegraph.llm.run.generation import Generation
from piecegraph.llm.run.prompts import name_prompt, refusal_of
from piecegraph.llm.run.results import Ending, News, TokenLogprob

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


class Outlet(Protocol):
    """Where what is new goes to: an event loop, or another process."""

    def send(self, news: list[News]) -> bool:
        """Send it, without waiting for anybody; False if nobody is there any more."""


@dataclass(eq=False)
class Call:
    """One prompt on its way. Only the engine's thread touches it once it is ordered."""

    asked: Asked
    number: int
    key: Any
    """What its reader knows it by,"""
    outlet: Outlet
    """and where it reads."""
    places: list[_Place] = field(default_factory=list)
    """One for each answer."""
    is_cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Place:
    """One answer of a call."""

    call: Call
    index: int
    generation: Generation
    is_streamed: bool
    """Whether its tokens are sent as they come, or at the end."""
    has_begun: bool = False
    """Whether it waits no more: the scheduler has it, or it has ended."""
    key: Any = field(init=False)
    """Of the call."""
    tokens: array[int] = field(init=False)
    """Of its request, which grow."""
    num_sent: int = field(init=False)
    """How many of them were sent, or are the prompt's."""
    has_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        request = self.generation.request
        self.key, self.tokens, self.num_sent = self.call.key, request.tokens, request.num_prompt
        self.has_logprobs = request.params.logprobs is not None

    def last_logprobs(self, count: int) -> list[TokenLogprob]:
        found = self.generation.logprobs
        return found[len(found) - count :]


class AsyncLLM(Asking):
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
        super().__init__(self.llm.started.loaded.tokenizer)
        self._owns_llm = not isinstance(model, LLM)
        self._records_idle = records_idle
        self._numbers = itertools.count()
        self._loop_outlet: _LoopOutlet | None = None
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
        self._calls: set[Call] = set()
        self._waiting: list[tuple[int, int, int, _Place]] = []
        """A heap: priority, number of the call, number of the answer. See Note [Priorities]."""
        self._deadlines: list[tuple[float, int, Call]] = []
        self._in_engine: dict[str, _Place] = {}
        self._streams: dict[Outlet, dict[str, _Place]] = {}
        """Those of them whose tokens are sent as they come, by where to."""
        self._new: list[tuple[Outlet, list[News]]] = []
        """What they have got in the last step."""
        self._outbox: deque[tuple[_Place, News]] = deque()
        """Other threads append to it, too: a step is run for everybody's requests, by whoever has the lock."""
        self._ends_all = self._has_left = False
        self._thread = threading.Thread(target=self._serve, name="piecegraph-engine", daemon=True)
        self._thread.start()

    # -- in event loops

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    def _ask(self, prompt: Any, asked: Asked, inbox: Inbox) -> asyncio.Future[None] | None:
        call = self.accept(asked, inbox, self._outlet_of(inbox.loop))
        inbox.cancel = functools.partial(self.end, call)
        inbox.stop = functools.partial(self.stop, call)
        read = functools.partial(self._read, call, prompt, inbox)
        # Tokenizers and grammars take their time.
        if isinstance(prompt, str) or asked.params.structured_outputs is not None:
            return inbox.loop.run_in_executor(self._tokenizing, read)
        read()
        return None

    def _outlet_of(self, loop: asyncio.AbstractEventLoop) -> Outlet:
        if self._loop_outlet is None or self._loop_outlet.loop is not loop:
            self._loop_outlet = _LoopOutlet(loop)
        return self._loop_outlet

    def _read(self, call: Call, prompt: Any, inbox: Inbox) -> None:
        """Read a prompt and have it queued, or tell why it is refused. In its event loop or the tokenizer's thread."""
        params = call.asked.params
        try:
            tokens = self._tokens(prompt, params)
            call.asked = self._for_engine(call.asked)
        except Exception as error:  # noqa: BLE001 - likewise
            refusal: PiecegraphError | None = self.refuse(call, error)
        else:
            refusal = self.begin(call, tokens, functools.partial(self._open, inbox, prompt, params))
        if refusal is not None:
            call.outlet.send([(inbox, 0, [], None, refusal)])

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

    # -- of calls, wherever they come from

    def accept(self, asked: Asked, key: Any, outlet: Outlet) -> Call:
        """Let a call wait for its prompt to be read, and for a place behind that.

        Raises:
            RequestError: PG658, as many wait as may.
            ConfigError: PG106, the model was closed.
        """
        num_answers = asked.params.n
        with self._mutex:
            if not self._is_open:
                raise ConfigError("PG106", "the model was called after close()", hint="load it again")
            num_waiting = self._num_waiting
            if num_waiting + num_answers > self.max_queue:
                why = f"there are {num_waiting} waiting, and max_queue is {self.max_queue}"
                raise RequestError("PG658", "the queue is full", why=why, hint="ask again later")
            self._num_accepted += num_answers
        return Call(asked, next(self._numbers), key, outlet)

    def begin(
        self, call: Call, tokens: Any, on_read: Callable[[list[int]], None] | None = None
    ) -> PiecegraphError | None:
        """Queue a call that was accepted; why it is refused, if it is. Any thread may do it.

        Args:
            call: which.
            tokens: its prompt.
            on_read: called with the tokens of a prompt that is one, before anything is sent.
        """
        asked = call.asked
        try:
            generations = self.llm.running.prepare(
                tokens,
                asked.params,
                on_new=lambda index: functools.partial(self._take_end, call, index),
                makes_text=False,
                arrival_time=asked.arrival_time,
            )
            self.llm.started.engine.scheduler.check_fits(generations[0].request)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must give back its place in the queue
            return self.refuse(call, error)
        if on_read is not None:
            on_read(generations[0].request.tokens.tolist())
        call.places = [
            _Place(call, index, generation, asked.is_streamed) for index, generation in enumerate(generations)
        ]
        self._order(self._begin, call)
        return _gone() if self._has_left else None

    def refuse(self, call: Call, error: Exception) -> PiecegraphError:
        """A call that was accepted is not begun; the error in the words of a prompt."""
        with self._mutex:
            self._num_accepted -= call.asked.params.n
        self._order(_wake)  # it may be the last that is waited for
        return refusal_of(error)

    def end(self, call: Call) -> None:
        """Nobody wants it any more. Any thread may say so, and a destructor."""
        self._order(self._end, call)

    def stop(self, call: Call, index: int) -> None:
        """One of its answers is complete as it is."""
        self._order(self._stop, call, index)

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

    def _begin(self, call: Call) -> None:
        if call.is_cancelled:  # before its prompt was read
            self._num_begun += len(call.places)
            return
        self._calls.add(call)
        for place in call.places:
            heapq.heappush(self._waiting, (call.asked.priority, call.number, place.index, place))
        if call.asked.deadline is not None:
            heapq.heappush(self._deadlines, (call.asked.deadline, call.number, call))
        if self._ends_all:
            self._end(call)

    def _end(self, call: Call, error: RequestError | None = None) -> None:
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

    def _stop(self, call: Call, index: int) -> None:
        if call in self._calls:
            with self.llm.lock:
                self.llm.started.engine.abort(call.places[index].generation)

    def _end_waiting(self, place: _Place, error: RequestError | None) -> None:
        place.generation.request.end("abort" if error is None else "error", error)
        place.has_begun = True
        self._num_begun += 1
        self._take_end(place.call, place.index, place.generation, "", [])

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
            if place.is_streamed:
                self._streams.setdefault(place.call.outlet, {})[place.generation.request.id] = place
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
        self._take_new()

    def _take_new(self) -> None:
        """Take the tokens that streams have got since the last step. The engine need not tell of each of them."""
        for outlet, places in self._streams.items():
            news: list[News] = []
            for place in places.values():
                tokens, first = place.tokens, place.num_sent
                num_new = len(tokens) - first
                if num_new:
                    place.num_sent = first + num_new
                    new = [tokens[-1]] if num_new == 1 else tokens[first:].tolist()
                    logprobs = place.last_logprobs(num_new) if place.has_logprobs else None
                    news.append((place.key, place.index, new, logprobs, None))
            if news:
                self._new.append((outlet, news))

    def _take_end(self, call: Call, index: int, generation: Generation, _text: str, _tokens: list[int]) -> None:
        """An answer has ended. By whoever runs the step."""
        place = call.places[index]
        new = generation.request.tokens[place.num_sent :].tolist()
        place.num_sent += len(new)
        logprobs = place.last_logprobs(len(new)) if place.has_logprobs else None
        self._outbox.append((place, (call.key, index, new, logprobs, _ending_of(generation))))

    def _send_new(self) -> None:
        """Send what is new to where it is read: to each outlet in one call, and behind it what has ended."""
        new, self._new = self._new, []
        sent: dict[Outlet, list[News]] = {}
        for outlet, news_of_step in new:
            sent.setdefault(outlet, []).extend(news_of_step)
        while self._outbox:
            place, news = self._outbox.popleft()
            sent.setdefault(place.call.outlet, []).append(news)
            self._forget(place)
        for outlet, all_news in sent.items():
            if not outlet.send(all_news):
                self._end_of_outlet(outlet)

    def _end_of_outlet(self, outlet: Outlet) -> None:
        """Nobody reads there any more."""
        for call in [call for call in self._calls if call.outlet is outlet]:
            self._end(call)

    def _forget(self, place: _Place) -> None:
        """An answer has come to its end."""
        request_id, outlet = place.generation.request.id, place.call.outlet
        self._in_engine.pop(request_id, None)
        if place.is_streamed and (streams := self._streams.get(outlet)) is not None:
            streams.pop(request_id, None)
            if not streams:
                del self._streams[outlet]
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
            call.outlet.send([(call.key, 0, [], None, _gone())])
        with contextlib.suppress(ConfigError):
            self._end_all()


def _wake() -> None:
    """An order to look around."""


class _LoopOutlet:
    """An event loop of this process, in which calls are known by their inboxes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def send(self, news: list[News]) -> bool:
        """False if the loop is closed, with all that was waiting in it."""
        try:
            self.loop.call_soon_threadsafe(_receive, news)
        except RuntimeError:
            return False
        return True


def _receive(news: list[News]) -> None:
    for inbox, *new in news:
        inbox.receive(*new)


def _ending_of(generation: Generation) -> Ending:
    """In plain tensors, and in the words of a prompt."""
    with torch.inference_mode(False):
        found = generation.ending()
    return found if found.error is None else replace(found, error=name_prompt(found.error, None))


def _gone() -> RequestError:
    return RequestError("PG650", "the engine has ended", why="its thread failed, or the model was closed")


def _max_queue(given: Any) -> int:
    found = as_integer(given)
    if found is None or found < 1:
        raise ConfigError("PG101", f"max_queue is {given!r}", why="it must be a positive integer")
    return found
