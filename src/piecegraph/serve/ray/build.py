"""From the arguments of a Ray Serve application to the application."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from piecegraph.serve.ray.front import Front
from piecegraph.serve.ray.replica import EngineReplica
from piecegraph.serve.ray.router import PrefixRouter


class Scaling(BaseModel):
    """How many replicas there are: as many as their requests need."""

    model_config = ConfigDict(extra="forbid")

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(ge=1)
    target_ongoing_requests: float = Field(64, gt=0)
    """Requests of a replica, running or waiting, above which there are to be more replicas."""
    downscale_delay_s: float = Field(600, ge=0)


class AppArgs(BaseModel):
    """What ``args`` of the application in Ray Serve's configuration may hold."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    """A folder that every machine has, or a name that transformers can find."""
    model_name: str | None = None
    """What requests call it; ``model`` by default."""
    replicas: int | Scaling = 1
    num_gpus: float = 1
    """Of each replica; 0 for a CPU."""
    num_cpus: float = 1
    """Of each replica."""
    fronts: int = Field(1, ge=1)
    host: str = "127.0.0.1"
    """Where Ray's proxies listen, which is said in ``http_options``: by it, requests without a key are judged."""
    max_ongoing_requests: int = Field(512, ge=1)
    """Requests that a replica has at once; further ones wait at the fronts,"""
    max_queued_requests: int = Field(1024, ge=-1)
    """which hold as many and refuse others."""
    drain_s: float = Field(600, ge=0)
    """How long the requests of a replica that is stopped may take to end."""
    timeout_s: float | None = None
    """Of a request."""
    max_body_bytes: int = 16 * 2**20
    llm: dict[str, Any] = {}
    """Arguments of :class:`piecegraph.LLM`."""


def build(chosen: AppArgs) -> Application:
    """The application: a front that has a handle of the engines."""
    scaled = chosen.replicas
    number: dict[str, Any] = (
        {"num_replicas": scaled} if isinstance(scaled, int) else {"autoscaling_config": scaled.model_dump()}
    )
    name = chosen.model_name or chosen.model
    engines = serve.deployment(
        EngineReplica,
        name="engine",
        ray_actor_options={"num_gpus": chosen.num_gpus, "num_cpus": chosen.num_cpus},
        max_ongoing_requests=chosen.max_ongoing_requests,
        max_queued_requests=chosen.max_queued_requests,
        graceful_shutdown_timeout_s=chosen.drain_s,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        **number,
    ).bind(name, chosen.model, {"timeout_s": chosen.timeout_s}, _arguments(chosen))
    front = serve.deployment(
        serve.ingress()(Front),
        name="front",
        num_replicas=chosen.fronts,
        max_ongoing_requests=_UNBOUNDED,
        graceful_shutdown_timeout_s=chosen.drain_s,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(engines, {"max_body_bytes": chosen.max_body_bytes, "host": chosen.host})


_UNBOUNDED = 2**20
"""Requests that a front has at once: it only passes them on, and what waits for an engine is counted there."""


def _arguments(chosen: AppArgs) -> dict[str, Any]:
    """Of an AsyncLLM. Its queue takes all that Ray sends it."""
    on_gpu = chosen.num_gpus > 0
    return {
        "max_queue": chosen.max_ongoing_requests * 128,  # each may ask for several answers
        "records_idle": True,
        "device": "cuda" if on_gpu else "cpu",
        "backend": "inductor" if on_gpu else "eager",
        **chosen.llm,
    }
