"""The models of one server: loaded, found by the name that requests call them, unloaded.

Note [Loading beside others]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Models are loaded one behind the other: each takes what is left of the memory, and measures it. On a GPU a recording
meets what others run there meanwhile (their random numbers, their synchronisation), so the other models hold their
steps for as long as one is loaded; their requests wait. Missing sizes are only recorded by a model that is alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from piecegraph.errors import PiecegraphError
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.serve.failures import ApiError
from piecegraph.serve.metrics import Metrics
from piecegraph.serve.service import Service
from piecegraph.serve.settings import ServeSettings

State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model that is to be served."""

    name: str
    """What requests call it."""
    path: str
    memory_fraction: float | None = None
    """Its share of the memory; None for the default of :class:`piecegraph.LLM`."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str = "auto"


Load = Callable[[ModelSpec], AsyncLLM]


class Models:
    """What a server serves.

    Args:
        settings: of the server.
        load: makes a model. It is called on another thread.
    """

    def __init__(self, settings: ServeSettings, load: Load) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.state: State = "loading"
        self._load = load
        self._services: dict[str, Service] = {}
        self._one_at_a_time = asyncio.Lock()

    def find(self, name: str | None) -> Service:
        """The model of that name; of None, the first one. Raises what a client is told if there is none."""
        if name is None and self._services:
            return next(iter(self._services.values()))
        if name not in self._services:
            what = "no model is served here" if name is None else f"the model {name!r} is not served here"
            raise ApiError(404, what, code="model_not_found", param="model")
        return self._services[name]

    def all(self) -> tuple[Service, ...]:
        return tuple(self._services.values())

    @property
    def health(self) -> tuple[bool, str]:
        """Whether there is hope, and in a word."""
        if not all(service.is_healthy for service in self.all()):
            return False, "failing"
        return self.state != "failed", self.state

    def drain(self) -> None:
        """No further requests are wanted; those that come all the same are answered as long as there is a model."""
        if self.state == "ready":
            self.state = "draining"

    async def begin(self, specs: Sequence[ModelSpec]) -> None:
        """Load what a server begins with."""
        for spec in specs:
            self._add(spec)
        try:
            for spec in specs:
                self.find(spec.name).begin(await self._loaded(spec))
        except BaseException:
            self.state = "failed"
            raise
        self.state = "ready"

    async def end(self) -> None:
        """No connection is left: let go of all models."""
        self.drain()
        await asyncio.gather(*(service.end() for service in self.all() if service.state == "ready"))

    async def load(self, spec: ModelSpec) -> Service:
        """One more. Raises what a client is told if that cannot be."""
        if spec.name in self._services:
            raise ApiError(409, f"the model {spec.name!r} is there already", code="model_exists", param="model")
        service = self._add(spec)
        try:
            async with self._one_at_a_time:
                service.begin(await self._loaded(spec))
        except PiecegraphError as error:
            raise ApiError(400, str(error), code=error.code, param="path") from error
        finally:
            if service.state == "loading":
                del self._services[spec.name]
        return service

    async def unload(self, name: str) -> None:
        """One less, once its requests have ended."""
        service = self.find(name)
        await service.end()
        del self._services[name]

    def _add(self, spec: ModelSpec) -> Service:
        found = self._services[spec.name] = Service(spec.name, self.settings, self.metrics)
        return found

    async def _loaded(self, spec: ModelSpec) -> AsyncLLM:
        others = [service.llm for service in self.all() if service.state == "ready"]

        def load() -> AsyncLLM:
            with _held(others):
                return self._load(spec)

        return await _in_thread(load)


@contextlib.contextmanager
def _held(others: list[AsyncLLM]) -> Iterator[None]:
    """No step of these models is run meanwhile, if they are on a GPU. See Note [Loading beside others]."""
    with contextlib.ExitStack() as stack:
        for other in others:
            if other.llm.config.device.type == "cuda":
                stack.enter_context(other.llm.lock)
        yield


def fraction_beside_others(device: str, share: float) -> float:
    """The ``memory_fraction`` of a model that is to have a share of its own: of a GPU, it counts what others have."""
    on_gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    if not on_gpu:
        return share
    free, total = torch.cuda.mem_get_info(None if device == "auto" else device)
    return min(1.0, share + (total - free) / total)


async def _in_thread(load: Callable[[], AsyncLLM]) -> AsyncLLM:
    """Call something on a thread that nobody waits for when the process ends: a model takes its time."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[AsyncLLM] = loop.create_future()

    def tell(set_it: Callable[..., None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(lambda: None if done.done() else set_it(value))

    def run() -> None:
        try:
            found = load()
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            tell(done.set_exception, error)
        else:
            tell(done.set_result, found)

    threading.Thread(target=run, name="piecegraph-load", daemon=True).start()
    return await done
