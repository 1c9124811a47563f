"""The models of one server: loaded, found by the name that requests call them, unloaded.

Note [Loading beside others]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Models are loaded one behind the other: each takes what is left of the memory, and measures it. On a GPU a recording
meets what others run there meanwhile (their random numbers, their synchronisation), so the other models hold their
steps for as long as one is loaded; their requests wait. Missing sizes are only recorded by a model that is alone.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from piecegraph.base.version import VERSION
from piecegraph.errors import PiecegraphError
from piecegraph.llm.async_llm import AsyncLLM
from piecegraph.serve.about import About
from piecegraph.serve.catalog import Catalog, ModelSpec
from piecegraph.serve.failures import ApiError
from piecegraph.serve.metrics import Metrics
from piecegraph.serve.parsing import response_template_of
from piecegraph.serve.service import Service
from piecegraph.serve.settings import ServeSettings

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

Load = Callable[[ModelSpec], AsyncLLM]
Found = TypeVar("Found")


OnChange = Callable[[Service, About | None], Awaitable[None]]
"""Called when a model is added, ready (then it is told about), draining, or gone."""


class Models(Catalog):
    """What a server serves, in the process that runs it.

    Args:
        settings: of the server.
        load: makes a model. It is called on another thread.
    """

    def __init__(self, settings: ServeSettings, load: Load) -> None:
        self.metrics = Metrics()
        super().__init__(settings, self.metrics)
        self.on_change: OnChange | None = None
        """Other processes have to know of it before anybody is told that it is done."""
        self._load = load
        self._llms: dict[str, AsyncLLM] = {}
        """Those that are ready,"""
        self._abouts: dict[str, About] = {}
        """and what is to be known of them."""
        self._one_at_a_time = asyncio.Lock()

    @property
    def health(self) -> tuple[bool, str]:
        """Whether there is hope, and in a word."""
        if not all(llm.load().is_healthy for llm in self._llms.values()):
            return False, "failing"
        return self.state != "failed", self.state

    async def health_now(self) -> tuple[bool, str]:
        return self.health

    async def metrics_page(self) -> bytes:
        return self.metrics.page()

    async def stats(self, name: str | None) -> dict[str, Any]:
        names = [each.name for each in self.all()]
        found = {"status": self.health[1], "models": names, "version": VERSION, "time_s": time.monotonic()}
        if name is None and not names:
            return found
        service = self.find(name)
        found["model"] = service.name
        if service.state != "ready":
            return found
        llm = self._llms[service.name]
        load = dataclasses.asdict(llm.load())
        return {**found, "defaults": service.defaults, "load": load, "engine": llm.llm.stats()}

    def about_of(self, service: Service) -> About | None:
        """What is to be known of a model that is ready, or about to be."""
        return self._abouts.get(service.name)

    def llm_of(self, name: str) -> AsyncLLM:
        """A model that is ready. Raises what a client is told if it is not."""
        _ = self.find(name).llm
        return self._llms[name]

    async def begin(self, specs: Sequence[ModelSpec]) -> None:
        """Load what a server begins with."""
        for spec in specs:
            await self._add(spec)
        try:
            for spec in specs:
                await self._begin(self.find(spec.name), await self._loaded(spec))
        except BaseException:
            self.state = "failed"
            raise
        self.state = "ready"

    async def end(self) -> None:
        """No connection is left: let go of all models."""
        self.drain()
        await asyncio.gather(*(self._end(service) for service in self.all() if service.state == "ready"))

    async def load(self, spec: ModelSpec) -> Service:
        if spec.name in self._services:
            raise ApiError(409, f"the model {spec.name!r} is there already", code="model_exists", param="model")
        service = await self._add(spec)
        try:
            async with self._one_at_a_time:
                await self._begin(service, await self._loaded(spec))
        except PiecegraphError as error:
            raise ApiError(400, str(error), code=error.code, param="path") from error
        finally:
            if service.state == "loading":
                await self._forget(service)
        return service

    async def unload(self, name: str) -> None:
        service = self.find(name)
        _ = service.llm  # raises if it is not there yet, or not any more
        await self._end(service)
        await self._forget(service)

    async def _add(self, spec: ModelSpec) -> Service:
        found = self._services[spec.name] = Service(spec.name, self.settings, self.metrics)
        await self._tell(found)
        return found

    async def _begin(self, service: Service, llm: AsyncLLM) -> None:
        found = self._abouts[service.name] = about(llm)
        self._llms[service.name] = llm
        self.metrics.watch(service.name, llm)
        await self._tell(service, found)
        service.begin(llm, found)

    async def _end(self, service: Service) -> None:
        """Take no further requests, let the accepted ones end, and let go of the model."""
        service.end()
        del self._abouts[service.name]
        await self._tell(service)
        self.metrics.forget(service.name)
        await self._llms.pop(service.name).close(timeout_s=self.settings.drain_s)

    async def _forget(self, service: Service) -> None:
        del self._services[service.name]
        await self._tell(service)

    async def _tell(self, service: Service, found: About | None = None) -> None:
        if self.on_change is not None:
            await self.on_change(service, found)

    async def _loaded(self, spec: ModelSpec) -> AsyncLLM:
        others = list(self._llms.values())

        def load() -> AsyncLLM:
            with _held(others):
                return self._load(spec)

        return await in_thread(load)


def about(llm: AsyncLLM) -> About:
    """What is to be known of a model of this process."""
    started = llm.llm.started
    loaded, scheduler = started.loaded, started.engine.scheduler
    given = loaded.model.generation_config.to_diff_dict()
    longest = scheduler.limits.max_model_len
    # The last token is never computed.
    held = bisect.bisect_left(range(longest), True, key=lambda length: not scheduler.cache.can_hold(length))
    has_tokenizer = loaded.tokenizer is not None
    return About(
        path=llm.llm.path,
        tokenizer_path=loaded.tokenizer_path,
        is_local=loaded.is_local,
        max_model_len=longest,
        longest=min(longest, held),
        vocab_size=scheduler.limits.vocab_size,
        defaults={"temperature": 1.0} | {name: given[name] for name in _DEFAULTS if given.get(name) is not None},
        response_template=response_template_of(loaded.tokenizer, loaded.model) if has_tokenizer else None,
    )


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


async def in_thread(work: Callable[[], Found]) -> Found:
    """Call something on a thread that nobody waits for when the process ends: it takes its time."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Found] = loop.create_future()

    def tell(set_it: Callable[..., None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(lambda: None if done.done() else set_it(value))

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            tell(done.set_exception, error)
        else:
            tell(done.set_result, found)

    threading.Thread(target=run, name="piecegraph-work", daemon=True).start()
    return await done
