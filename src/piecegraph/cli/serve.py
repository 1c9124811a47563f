"""``piecegraph serve``: a language model behind an address."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from piecegraph.cli.loading import is_gpu, model_options
from piecegraph.errors import CommandError

if TYPE_CHECKING:
    from piecegraph.llm.async_llm import AsyncLLM

_INTERRUPTED = 130


@click.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option(
    "--api-key",
    multiple=True,
    envvar="PIECEGRAPH_API_KEY",
    help="One that requests must bring. [env: PIECEGRAPH_API_KEY]",
)
@click.option("--model-name", help="What requests call the model; MODEL by default.")
@click.option("--max-queue", type=click.IntRange(min=1), default=1024, show_default=True, help="Requests that wait.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), help="Requests that run together.  [256; 16 on a CPU]")
@click.option("--max-model-len", type=click.IntRange(min=2), help="Tokens of prompt and answer at most.")
@click.option(
    "--max-body-mb", type=click.FloatRange(0, min_open=True), default=16, show_default=True, help="Of a body."
)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds of a request, its waiting included.")
@click.option("--drain-timeout", type=click.FloatRange(min=0), help="Seconds that requests have left after SIGTERM.")
@model_options
def serve(
    model: str,
    host: str,
    port: int,
    api_key: tuple[str, ...],
    model_name: str | None,
    max_queue: int,
    max_body_mb: float,
    timeout: float | None,
    drain_timeout: float | None,
    **how: Any,
) -> None:
    """Serve a language model over HTTP, as OpenAI's API has it.

    MODEL is a folder with a transformers model, a name that transformers can find, or "demo". GET /ready tells when it
    is loaded. SIGTERM and Ctrl-C let the requests that were accepted end.
    """
    _check_installed()
    from piecegraph.serve.server import serve as run_server
    from piecegraph.serve.settings import ServeSettings

    settings = ServeSettings(
        model_name=model_name or model,
        host=host,
        port=port,
        api_keys=api_key,
        max_queue=max_queue,
        max_body_bytes=int(max_body_mb * 2**20),
        timeout_s=timeout,
        drain_s=drain_timeout,
    )
    if settings.is_open_to_others:
        click.echo(f"warning: {host} can be reached by others, and there is no --api-key", err=True)
    _log_requests()

    def on_ready(address: str) -> None:
        click.echo(f"ready: {settings.model_name} at {address}")

    if not run_server(settings, lambda: _load(model, max_queue, how), on_ready=on_ready):
        os._exit(_INTERRUPTED)  # a model cannot be stopped while it is loaded


def _load(model: str, max_queue: int, how: dict[str, Any]) -> AsyncLLM:
    from piecegraph.llm.async_llm import AsyncLLM

    backend = how.pop("backend")
    chosen = ("inductor" if is_gpu(how["device"]) else "eager") if backend == "auto" else backend
    return AsyncLLM(model, max_queue=max_queue, records_idle=True, backend=chosen, **how)


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        what, hint = f"{error.name} is not installed", 'pip install "piecegraph[serve]"'
        raise CommandError("PG615", what, why="the server needs it", hint=hint) from error


def _log_requests() -> None:
    """One line for each request, on standard error."""
    logger = logging.getLogger("piecegraph.serve.requests")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(sys.stderr))
