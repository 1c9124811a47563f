"""The engine's process of a server: it starts API processes, and does what they ask for. See Note [API processes]."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from piecegraph.errors import CommandError, PiecegraphError
from piecegraph.llm.async_llm import AsyncLLM, Call
from piecegraph.llm.run.results import News
from piecegraph.serve.about import About
from piecegraph.serve.catalog import ModelSpec
from piecegraph.serve.failures import ApiError
from piecegraph.serve.model_server import ModelServer
from piecegraph.serve.models import Models, in_thread
from piecegraph.serve.processes import launch
from piecegraph.serve.processes.link import Link, Message
from piecegraph.serve.processes.wire import asked_from_wire, error_to_wire, metrics_from_wire, news_to_wire
from piecegraph.serve.record import logger as request_logger
from piecegraph.serve.service import Service

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_MOST_FAILED_STARTS = 3
_LAST_S = 10
"""How long an API process that has closed its link may take to end."""


class EngineServer(ModelServer):
    """A server of several processes, in the one that runs the models.

    Args:
        models: which.
    """

    def __init__(self, models: Models) -> None:
        super().__init__(models)
        models.on_change = self._tell_all
        self._processes: list[ApiHandle] = []
        self._changed = asyncio.Event()
        """An API process has come further, or is gone."""
        self._num_failed_starts = 0
        self._error: CommandError | None = None

    @property
    def pids(self) -> list[int]:
        """Of the API processes."""
        return [each.pid for each in self._processes if each.pid is not None]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets
        launch.start_early()
        with self.capture_signals():
            self._processes = [ApiHandle(self, number, listening) for number, listening in enumerate(sockets)]
            starting = [asyncio.ensure_future(each.start()) for each in self._processes]
            try:
                while not self.should_exit:
                    await asyncio.sleep(_LOOK_S)
                for listening in sockets:  # or connections would wait here that nobody accepts
                    listening.close()
                await self._let_end()
            finally:
                for task, each in zip(starting, self._processes, strict=True):
                    task.cancel()
                    each.kill()
        if self._error is not None:
            raise self._error

    async def _let_end(self) -> None:
        """Until the last connection is answered."""
        for each in self._processes:
            each.post("drain")
        while any(each.is_up and each.is_running for each in self._processes) and not self.force_exit:
            await asyncio.sleep(_LOOK_S / 10)

    # -- models

    async def _tell_all(self, service: Service, about: About | None) -> None:
        """Have API processes know of a change; of a model that is ready, return when all have its tokenizer."""
        is_gone = self.models.all().count(service) == 0
        for each in self._processes:
            each.tell_model(service, about, is_gone=is_gone)
        if about is not None:
            while not all(service.name in each.has or self._has_left(each) for each in self._processes):
                self._changed.clear()
                await self._changed.wait()

    def _has_left(self, process: ApiHandle) -> bool:
        """Whether it has ended, and none takes its place."""
        return self.should_exit and not process.is_running

    def note_change(self) -> None:
        """One of the API processes has come further."""
        self._changed.set()

    # -- API processes that end

    async def restart(self, gone: ApiHandle) -> None:
        """An API process has ended by itself."""
        if self.should_exit:
            self.note_change()
            return
        self._num_failed_starts = 0 if gone.is_up else self._num_failed_starts + 1
        code = await gone.exit_code()
        what = f"API process {gone.number} (pid {gone.pid}) ended with {code}"
        if self._num_failed_starts >= _MOST_FAILED_STARTS:
            why = f"it is the {self._num_failed_starts}th that does so before it answers"
            hint = "its own lines on standard error say more; --api-processes 0 does without"
            self._error = CommandError("PG617", what, why=why, hint=hint)
            self.should_exit = True
            return
        logger.error("%s; its requests were ended, and another takes its place", what)
        self._processes[gone.number] = ApiHandle(self, gone.number, gone.listening)
        await self._processes[gone.number].start()


class ApiHandle:
    """One of the API processes, as the engine's sees it; where what is new of its calls goes to.

    Args:
        server: whose it is.
        number: among them.
        listening: where its clients connect.
    """

    def __init__(self, server: EngineServer, number: int, listening: socket.socket) -> None:
        self._server, self._models = server, server.models
        self.number, self.listening = number, listening
        self.has: set[str] = set()
        """Models whose tokenizers it has read."""
        self.is_up = False
        self.is_running = False
        self._calls: dict[int, tuple[AsyncLLM, Call]] = {}
        self._left: dict[int, int] = {}
        """How many answers of a call have not ended."""
        self._reading = ThreadPoolExecutor(1, "piecegraph-grammar")
        self._tasks: set[asyncio.Future[Any]] = set()
        ours, self._theirs = socket.socketpair()
        self._link = Link(ours)
        self._link.listen(self._receive, self._end)
        logs = bool(request_logger.handlers)
        self._process: Any = launch.FORKS.Process(
            target=launch.run,
            args=(number, listening, self._theirs, self._models.settings, logs),
            daemon=True,
            name=f"piecegraph-api-{number}",
        )
        for service in self._models.all():
            self.tell_model(service, self._models.about_of(service), is_gone=False)
        self.post("accept")

    async def start(self) -> None:
        """Fork it, which waits for imports the first time."""
        self.is_running = True
        try:
            await in_thread(self._process.start)
        except (OSError, EOFError):  # there is nothing to fork it from
            logger.exception("an API process cannot be started")
            self._link.close()
            self._end()
        finally:
            self._theirs.close()

    def post(self, *message: Any) -> None:
        """Tell it something."""
        self._link.post(message)

    def tell_model(self, service: Service, about: About | None, *, is_gone: bool) -> None:
        """A model has come further, or is gone."""
        if is_gone:
            self.post("forget", service.name)
            self.has.discard(service.name)
        else:
            told = None if about is None else dataclasses.asdict(about)
            self.post("model", service.name, service.created, service.state, told)

    @property
    def pid(self) -> int | None:
        """None before it is forked."""
        found: int | None = self._process.pid
        return found

    async def exit_code(self) -> int | None:
        """How it has ended; None if it cannot be told."""
        if self.pid is None:
            return None
        await in_thread(functools.partial(self._process.join, _LAST_S))
        if self._process.is_alive():  # without a link it is of no use, and keeps its clients waiting
            self._process.kill()
            await in_thread(self._process.join)
        found: int | None = self._process.exitcode
        return found

    def kill(self) -> None:
        """It has ended, or has to now."""
        self._link.close()
        if self.pid is not None:
            self._process.kill()
        self._reading.shutdown(wait=False)

    # -- what is new of its calls

    def send(self, news: list[News]) -> bool:
        """See :class:`~piecegraph.llm.async_llm.Outlet`. In the engine's thread."""
        for number, _, _, _, ending in news:
            if ending is not None:
                self._ended(number, whole_call=isinstance(ending, PiecegraphError))
        return self._link.send(("news", news_to_wire(news)))

    def _ended(self, number: int, *, whole_call: bool) -> None:
        """An answer of a call has ended, or all of them."""
        left = self._left.get(number, 1) - 1
        if left and not whole_call:
            self._left[number] = left
        else:
            self._left.pop(number, None)
            self._calls.pop(number, None)

    # -- what it asks for

    def _receive(self, message: Message) -> None:
        kind, *rest = message
        receive: Callable[..., None] = getattr(self, f"_on_{kind}")
        receive(*rest)

    def _on_up(self) -> None:
        self.is_up = True

    def _on_has(self, name: str) -> None:
        self.has.add(name)
        self._server.note_change()

    def _on_ask(self, number: int, model: str, wire: tuple[Any, ...], tokens: list[int]) -> None:
        try:
            llm, asked = self._models.llm_of(model), asked_from_wire(wire)
            call = llm.accept(asked, number, self)
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self.post("taken", number, _failure(error))
            return
        self._calls[number], self._left[number] = (llm, call), asked.params.n
        if asked.params.structured_outputs is None:
            self.post("taken", number, self._refusal(llm, call, number, tokens))
        else:  # a grammar takes its time
            self._reading.submit(self._begin_guided, llm, call, number, tokens)

    def _begin_guided(self, llm: AsyncLLM, call: Call, number: int, tokens: list[int]) -> None:
        self._link.send(("taken", number, self._refusal(llm, call, number, tokens)))

    def _refusal(self, llm: AsyncLLM, call: Call, number: int, tokens: list[int]) -> tuple[Any, ...] | None:
        """Have a call begun; why it is refused, if it is."""
        try:
            error: Exception | None = llm.begin(call, tokens)
        except Exception as unexpected:  # noqa: BLE001 - whoever waits is told
            error = unexpected
        if error is None:
            return None
        self._ended(number, whole_call=True)
        return _failure(error)

    def _on_end(self, number: int) -> None:
        llm, call = self._calls.pop(number, (None, None))
        self._left.pop(number, None)
        if llm is not None and call is not None:
            llm.end(call)

    def _on_stop(self, number: int, index: int) -> None:
        llm, call = self._calls.get(number, (None, None))
        if llm is not None and call is not None:
            llm.stop(call, index)

    def _on_observe(self, name: str, finish_reason: str, metrics: tuple[Any, ...]) -> None:
        self._models.metrics.observe_later(name, finish_reason, metrics_from_wire(metrics))

    def _on_count_response(self, status: int) -> None:
        self._models.metrics.count_response(status)

    def _on_question(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        answers: dict[str, Callable[..., Awaitable[Any]]] = {
            "health": self._models.health_now,
            "metrics_page": self._models.metrics_page,
            "stats": self._stats,
            "load": self._load,
            "unload": self._models.unload,
        }
        task = asyncio.ensure_future(self._answer(number, functools.partial(answers[name], *args)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, answer: Callable[[], Awaitable[Any]]) -> None:
        await asyncio.sleep(0)  # what others have counted by now is read first
        try:
            value, error = await answer(), None
        except Exception as failure:  # noqa: BLE001 - whoever waits is told
            value, error = None, _failure(failure)
        self.post("answer", number, error, value)

    async def _stats(self, name: str | None) -> str:
        return json.dumps(await self._models.stats(name) | {"api_processes": self._server.pids})

    async def _load(self, spec: dict[str, Any]) -> None:
        await self._models.load(ModelSpec(**spec))

    # -- its end

    def _end(self) -> None:
        """Nobody wants its calls any more."""
        self.is_running = False
        for llm, call in tuple(self._calls.values()):
            llm.end(call)
        self._calls.clear()
        self._reading.shutdown(wait=False)
        self._tasks.add(asyncio.ensure_future(self._server.restart(self)))


def _failure(error: Exception) -> tuple[Any, ...]:
    """What a client is told, by way of its API process."""
    if isinstance(error, (PiecegraphError, ApiError)):
        return error_to_wire(error)
    logger.error("the server failed", exc_info=error)
    return error_to_wire(ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error"))
