"""Replicas of a model on many machines, by Ray Serve: one front, engines behind it. It needs the extra ``ray``.

A request comes to the front, which knows keys and limits, and is passed on as it is to an engine: a replica that runs
the same application as ``piecegraph serve``. Replicas, scaling, health and draining are Ray's; ours are the router's
choice and what happens to the requests of a replica that is lost.
"""

from __future__ import annotations

from typing import Any

from piecegraph.base.extras import require_extra


def build_app(args: dict[str, Any]) -> Any:
    """An application for ``serve run``, ``serve deploy`` and ``ray.serve.run``.

    Args:
        args: see :class:`piecegraph.serve.ray.build.AppArgs`.

    Example:
        serve run piecegraph.serve.ray:build_app model=Qwen/Qwen3-0.6B
    """
    require_extra("ray", ["ray", "fastapi", "prometheus_client", "uvicorn", "transformers"], "replicas need it")
    from piecegraph.serve.ray.build import AppArgs, build

    return build(AppArgs(**args))
