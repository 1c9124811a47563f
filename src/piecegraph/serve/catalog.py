"""The models of a server as its endpoints see them: in the process that runs them, or in another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from piecegraph.serve.failures import ApiError
from piecegraph.serve.service import Counts, Service
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


class Catalog(ABC):
    """What a server serves.

    Args:
        settings: of the server.
        metrics: where its answers are counted.
    """

    def __init__(self, settings: ServeSettings, metrics: Counts) -> None:
        self.settings = settings
        self.counts = metrics
        self.state: State = "loading"
        self._services: dict[str, Service] = {}

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

    def drain(self) -> None:
        """No further requests are wanted; those that come all the same are answered as long as there is a model."""
        if self.state == "ready":
            self.state = "draining"

    @abstractmethod
    async def health_now(self) -> tuple[bool, str]:
        """Whether there is hope, and in a word."""

    @abstractmethod
    async def metrics_page(self) -> bytes:
        """All that is counted, as Prometheus reads it."""

    @abstractmethod
    async def stats(self, name: str | None) -> dict[str, Any]:
        """What the engine of a model does now, and has done."""

    @abstractmethod
    async def load(self, spec: ModelSpec) -> Service:
        """One more. Raises what a client is told if that cannot be."""

    @abstractmethod
    async def unload(self, name: str) -> None:
        """One less, once its requests have ended."""
