"""Replicas of a model on many machines, by Ray Serve: one front, engines behind it. It needs the extra ``ray``.

A request comes to the front, which knows keys and limits, and is passed on as it is to an engine: a replica that runs
the same application as ``piecegraph serve``. Replicas, scaling, health and draining are Ray's; ours are the router's
choice and what happens to the requests of a replica that is lost.
"""

from __future__ import annotations

from typing import Any

from piecegraph.errors import CommandError


def build_app(args: dict[str, Any]) -> Any:
    """An application for ``serve run``, ``serve deploy`` and ``ray.serve.run``.

    Args:
        args: see :class:`piecegraph.serve.ray.build.AppArgs`.

    Example:
        serve run piecegraph.serve.ray:build_app model=Qwen/Qwen3-0.6B
    """
    try:
        from piecegraph.serve.ray.build import AppArgs, build
    except ImportError as error:
        what, hint = f"{error.name} is not installed", 'pip install "piecegraph[ray]"'
        raise CommandError("PG615", what, why="replicas need it", hint=hint) from error
    return build(AppArgs(**args))
