"""``piecegraph serve``: a language model behind an address."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from piecegraph.base.collector import freeze_all
from piecegraph.base.extras import require_extra
from piecegraph.cli.loading import is_gpu, model_options, num_ranks, num_replicas, ranks_option, shared, this_rank

if TYPE_CHECKING:
    from piecegraph.llm.async_llm import AsyncLLM
    from piecegraph.serve.catalog import ModelSpec
    from piecegraph.serve.models import Load
    from piecegraph.serve.settings import ServeSettings

_INTERRUPTED = 130
_MOST_API_PROCESSES = 4


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
@click.option("--admin-key", multiple=True, envvar="PIECEGRAPH_ADMIN_KEY", help="One that may load and unload models.")
@click.option("--model-name", help="What requests call the model; MODEL by default.")
@click.option("--model", "others", multiple=True, metavar="NAME=PATH", help="One more model, by its name.")
@click.option("--memory-fraction", metavar="LIST", help="Of each model, such as 0.6,0.3.  [0.9 in all; 0.25 on a CPU]")
@click.option("--max-queue", type=click.IntRange(min=1), default=1024, show_default=True, help="Requests that wait.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), help="Requests that run together.  [256; 16 on a CPU]")
@click.option("--max-model-len", type=click.IntRange(min=2), help="Tokens of prompt and answer at most.")
@click.option(
    "--max-body-mb", type=click.FloatRange(0, min_open=True), default=16, show_default=True, help="Of a body."
)
@click.option(
    "--api-processes",
    type=click.IntRange(min=0),
    help="That speak HTTP for the one that runs the model; 0: it does.  [up to 4; 0 on a CPU]",
)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds of a request, its waiting included.")
@click.option("--drain-timeout", type=click.FloatRange(min=0), help="Seconds that requests have left after SIGTERM.")
@model_options
@ranks_option
def serve(
    model: str,
    host: str,
    port: int,
    api_key: tuple[str, ...],
    admin_key: tuple[str, ...],
    model_name: str | None,
    others: tuple[str, ...],
    memory_fraction: str | None,
    max_queue: int,
    max_body_mb: float,
    api_processes: int | None,
    timeout: float | None,
    drain_timeout: float | None,
    **how: Any,
) -> None:
    """Serve language models over HTTP, as OpenAI's API has it.

    MODEL is a folder with a transformers model, a name that transformers can find, or "demo". GET /ready tells when it
    is loaded. SIGTERM and Ctrl-C let the requests that were accepted end.
    """
    require_extra("serve", ["fastapi", "prometheus_client", "uvicorn"], "the server needs it")
    if not this_rank():
        _start_early(api_processes, how["device"])
    from piecegraph.serve.record import log_to_stderr
    from piecegraph.serve.server import serve as run_server
    from piecegraph.serve.settings import ServeSettings

    if num_ranks() and (others or admin_key):
        raise click.UsageError("--model and --admin-key are for one process: ranks share one model.")
    if (number := num_replicas(how["tensor_parallel_size"])) > 1:
        told = f"--tensor-parallel-size {how['tensor_parallel_size']} leaves {number} replicas, and one is served here"
        raise click.UsageError(f"{told}: use Ray Serve for several (docs/serve.md), or start a job for each.")
    named = _named(model_name or model, model, others)
    fractions = _fractions(memory_fraction, len(named), on_gpu=is_gpu(how["device"]))
    specs = _specs(named, fractions, how)
    if this_rank():
        _follow(specs[0], how)
        return
    if api_processes is None:
        api_processes = _api_processes() if is_gpu(how["device"]) else 0
    settings = ServeSettings(
        host=host,
        port=port,
        api_keys=api_key,
        admin_keys=admin_key,
        max_queue=max_queue,
        max_body_bytes=int(max_body_mb * 2**20),
        api_processes=api_processes,
        timeout_s=timeout,
        drain_s=drain_timeout,
    )
    if settings.is_open_to_others:
        click.echo(f"warning: {host} can be reached by others, and there is no --api-key", err=True)
    log_to_stderr()

    def on_ready(address: str) -> None:
        freeze_all()
        click.echo(f"ready: {', '.join(named)} at {address}")

    if not run_server(settings, specs, _loader(settings, len(named) == 1, how), on_ready=on_ready):
        os._exit(_INTERRUPTED)  # a model cannot be stopped while it is loaded


def _start_early(given: int | None, device: str) -> None:
    """API processes import what they need while this one does. Whether there is a GPU is not known for sure yet."""
    is_likely = device != "cpu" and Path("/dev/nvidiactl").exists() and _api_processes() > 0
    if is_likely if given is None else given > 0:
        from piecegraph.serve.processes.launch import start_early

        start_early()


def _api_processes() -> int:
    """How many there are if nobody says: a quarter of the cores at most, as a model needs some, too."""
    return min(_MOST_API_PROCESSES, len(os.sched_getaffinity(0)) // 4) if hasattr(os, "sched_getaffinity") else 0


def _named(name: str, path: str, others: Sequence[str]) -> dict[str, str]:
    """The paths of all models by their names."""
    found = {name: path}
    for other in others:
        name, _, path = other.partition("=")
        if not name or not path or name in found:
            raise click.BadParameter(f"{other!r} is not NAME=PATH with a name of its own", param_hint="--model")
        found[name] = path
    return found


def _fractions(given: str | None, num_models: int, *, on_gpu: bool) -> list[float | None]:
    """The share of the memory that each model has."""
    if given is None:
        return [None if num_models == 1 else (0.9 if on_gpu else 0.25) / num_models] * num_models
    try:
        found = [float(each) for each in given.split(",")]
    except ValueError:
        found = []
    if len(found) != num_models or not all(each > 0 for each in found) or sum(found) > 1:
        why = f"it must be {num_models} positive numbers that are at most 1 together"
        raise click.BadParameter(f"{given!r}: {why}", param_hint="--memory-fraction")
    return list(found)


def _specs(named: dict[str, str], fractions: Sequence[float | None], how: dict[str, Any]) -> list[ModelSpec]:
    from piecegraph.serve.catalog import ModelSpec

    limits = {name: how[name] for name in ("max_model_len", "max_num_seqs", "dtype")}
    return [
        ModelSpec(name=name, path=path, memory_fraction=fraction, **limits)
        for (name, path), fraction in zip(named.items(), fractions, strict=True)
    ]


def _loader(settings: ServeSettings, is_alone: bool, how: dict[str, Any]) -> Load:
    """What makes a model of the server."""

    def load(spec: ModelSpec) -> AsyncLLM:
        from piecegraph.llm.async_llm import AsyncLLM

        records_idle = not is_gpu(how["device"]) or (is_alone and not settings.admin_keys)
        return AsyncLLM(spec.path, max_queue=settings.max_queue, records_idle=records_idle, **_arguments(spec, how))

    return load


def _arguments(spec: ModelSpec, how: dict[str, Any]) -> dict[str, Any]:
    """Of an LLM: the same on every rank."""
    from piecegraph.serve.models import fraction_beside_others

    device, backend, fraction = how["device"], how["backend"], spec.memory_fraction
    if fraction is not None and not num_ranks():
        fraction = fraction_beside_others(device, fraction)
    return {
        "memory_fraction": fraction,
        "backend": ("inductor" if is_gpu(device) else "eager") if backend == "auto" else backend,
        "device": device,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        **shared(device, how["tensor_parallel_size"]),
    }


def _follow(spec: ModelSpec, how: dict[str, Any]) -> None:
    """Run the model together with the rank that serves it, until that one closes it."""
    import piecegraph

    llm = piecegraph.LLM(spec.path, **_arguments(spec, how))
    for each in (signal.SIGTERM, signal.SIGINT):  # they are sent to all ranks, and the first lets its requests end
        signal.signal(each, signal.SIG_IGN)
    llm.follow()
