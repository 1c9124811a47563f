"""The models of a server as one of its API processes sees them. See Note [API processes]."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

from piecegraph.errors import ConfigError, PiecegraphError, RequestError
from piecegraph.llm.asking import Asked, Asking
from piecegraph.llm.model.tokenizer import read_tokenizer
from piecegraph.llm.run.answers import Inbox
from piecegraph.llm.run.prompts import refusal_of, tokenizer_or_error
from piecegraph.llm.run.results import Completion
from piecegraph.serve.about import About
from piecegraph.serve.catalog import Catalog, ModelSpec
from piecegraph.serve.processes.link import Link, Message
from piecegraph.serve.processes.wire import asked_to_wire, details_from_wire, error_from_wire, metrics_to_wire
from piecegraph.serve.service import Service
from piecegraph.serve.settings import ServeSettings


class Engine:
    """The engine's process: calls that are on their way there, and questions.

    Args:
        link: to it.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._numbers = itertools.count()
        self._inboxes: dict[int, Inbox] = {}
        self._taken: dict[int, asyncio.Future[None]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self.is_gone = False

    def open(self, inbox: Inbox) -> tuple[int, asyncio.Future[None]]:
        """The number of a new call, and what is done once the engine has taken it or refused it."""
        number, taken = next(self._numbers), inbox.loop.create_future()
        self._inboxes[number], self._taken[number] = inbox, taken
        inbox.cancel = functools.partial(self._cancel, inbox.loop, number)
        inbox.stop = lambda index: self._link.post(("stop", number, index))
        return number, taken

    def ask(self, number: int, model: str, asked: Asked, tokens: list[int]) -> None:
        """Have the engine answer a prompt, unless nobody wants it any more."""
        if self.is_gone:
            self.refuse(number, _gone())
        elif number in self._inboxes:
            self._link.post(("ask", number, model, asked_to_wire(asked), tokens))

    def refuse(self, number: int, error: PiecegraphError) -> None:
        """A call comes to nothing."""
        inbox = self._inboxes.pop(number, None)
        if inbox is not None:
            inbox.refuse(error)
        self._take(number)

    def post(self, *message: Any) -> None:
        """Tell the engine something."""
        self._link.post(message)

    async def question(self, name: str, *args: Any) -> Any:
        """What the engine answers. Raises what it raises."""
        if self.is_gone:
            raise _gone()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self._link.post(("question", number, name, args))
        try:
            return await answer
        finally:
            del self._questions[number]

    def receive(self, message: Message) -> None:
        """What concerns a call or a question."""
        kind, *rest = message
        if kind == "news":
            self._receive_news(rest[0])
        elif kind == "taken":
            number, error = rest
            if error is not None:
                self.refuse(number, error_from_wire(error))
            self._take(number)
        else:
            assert kind == "answer", kind
            number, error, value = rest
            answer = self._questions.get(number)
            if answer is not None and not answer.done():
                answer.set_result(value) if error is None else answer.set_exception(error_from_wire(error))

    def end(self) -> None:
        """The engine's process is gone."""
        self.is_gone = True
        for number in tuple(self._inboxes):
            self.refuse(number, _gone())
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(_gone())

    def _receive_news(self, news: list[tuple[Any, ...]]) -> None:
        for number, index, tokens, logprobs, told in news:
            inbox = self._inboxes.get(number)
            if inbox is None:
                continue  # it was cancelled
            if logprobs is None and told is None:
                inbox.receive(index, tokens, None, None)
                continue
            inbox.receive(index, tokens, *details_from_wire(logprobs, told))
            if inbox.is_done:
                del self._inboxes[number]

    def _take(self, number: int) -> None:
        taken = self._taken.pop(number, None)
        if taken is not None and not taken.done():
            taken.set_result(None)

    def _cancel(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """From any thread, and in a destructor."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._end, number)

    def _end(self, number: int) -> None:
        self._take(number)
        if self._inboxes.pop(number, None) is not None:
            self._link.post(("end", number))


def _gone() -> RequestError:
    return RequestError("PG650", "the engine has ended", why="its process is gone")


class RemoteLLM(Asking):
    """A model of another process.

    Args:
        engine: that process.
        name: what it knows the model by.
        tokenizer: of the model; None if it has none.
        path: of the model, for errors.
        tokenizer_error: why it has none.
    """

    def __init__(self, engine: Engine, name: str, tokenizer: Any | None, path: str, tokenizer_error: str) -> None:
        super().__init__(tokenizer)
        self._engine, self._name, self._path, self._why = engine, name, path, tokenizer_error

    @property
    def tokenizer(self) -> Any:
        return tokenizer_or_error(self.tokenizer_if_any, self._path, self._why)

    def _ask(self, prompt: Any, asked: Asked, inbox: Inbox) -> asyncio.Future[None]:
        if asked.params.logits_processors:
            why = "functions do not pass between processes"
            raise ConfigError("PG108", "logits_processors was given to a model of another process", why=why)
        number, taken = self._engine.open(inbox)
        read = functools.partial(self._read, number, prompt, asked, inbox)
        if isinstance(prompt, str) or any(isinstance(word, str) for word in asked.params.bad_words):
            inbox.loop.run_in_executor(self._tokenizing, _returned, inbox.loop, read)
        else:
            read()()
        return taken

    def _read(self, number: int, prompt: Any, asked: Asked, inbox: Inbox) -> Callable[[], None]:
        """Read a prompt, in any thread; what the event loop is to do with it."""
        try:
            tokens = list(self._tokens(prompt, asked.params))
            for_engine = self._for_engine(asked)
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            return functools.partial(self._engine.refuse, number, refusal_of(error))
        self._open(inbox, prompt, asked.params, tokens)
        return functools.partial(self._engine.ask, number, self._name, for_engine, tokens)

    def close(self) -> None:
        """No further requests come."""
        self._tokenizing.shutdown(wait=False)


def _returned(loop: asyncio.AbstractEventLoop, read: Callable[[], Callable[[], None]]) -> None:
    loop.call_soon_threadsafe(read())


class RemoteCounts:
    """What is counted, in the engine's process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def observe(self, name: str, answer: Completion) -> None:
        self._engine.post("observe", name, answer.finish_reason, metrics_to_wire(answer.metrics))

    def count_response(self, status: int) -> None:
        self._engine.post("count_response", status)


class RemoteModels(Catalog):
    """What a server serves, as the engine's process tells.

    Args:
        settings: of the server.
        engine: that process.
    """

    def __init__(self, settings: ServeSettings, engine: Engine) -> None:
        super().__init__(settings, RemoteCounts(engine))
        self._engine = engine
        self._reading: set[asyncio.Task[None]] = set()

    def set_model(self, name: str, created: int, state: str, about: dict[str, Any] | None) -> None:
        """A model is added, is ready, which is confirmed once its tokenizer is read here, or drains."""
        service = self._services.get(name)
        if service is None:
            service = self._services[name] = Service(name, self.settings, self.counts)
            service.created = created
        if state == "draining":
            service.end()
        elif about is not None:
            reading = asyncio.ensure_future(self._begin(service, About(**about)))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    def forget(self, name: str) -> None:
        """A model is gone."""
        self._services.pop(name, None)

    async def read(self) -> None:
        """Return when the tokenizers of all models that were ready are read."""
        await asyncio.gather(*self._reading)

    async def _begin(self, service: Service, about: About) -> None:
        read = functools.partial(read_tokenizer, about.tokenizer_path, is_local=about.is_local)
        tokenizer, error = await asyncio.to_thread(read)
        if self._services.get(service.name) is not service or service.state != "loading":
            return  # it is gone, or about to be
        service.begin(RemoteLLM(self._engine, service.name, tokenizer, about.path, error), about)
        self._engine.post("has", service.name)

    async def health_now(self) -> tuple[bool, str]:
        try:
            is_well, word = await self._engine.question("health")
        except RequestError:  # it is gone
            return False, "failing"
        return is_well, word

    async def metrics_page(self) -> bytes:
        found: bytes = await self._engine.question("metrics_page")
        return found

    async def stats(self, name: str | None) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self._engine.question("stats", name))
        return found

    async def load(self, spec: ModelSpec) -> Service:
        fields = ("name", "path", "memory_fraction", "max_model_len", "max_num_seqs", "dtype")
        await self._engine.question("load", {field: getattr(spec, field) for field in fields})
        return self.find(spec.name)

    async def unload(self, name: str) -> None:
        await self._engine.question("unload", name)
