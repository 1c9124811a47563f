"""``piecegraph warm``: what a start would trace and compile is made ahead of time."""

from __future__ import annotations

from typing import Any

import click

from piecegraph.cli.loading import is_gpu, model_options
from piecegraph.errors import CacheError


@click.command()
@click.argument("model")
@model_options
@click.option("--max-model-len", type=click.IntRange(min=2), help="As it will be served.")
@click.option("--max-num-seqs", type=click.IntRange(min=1), help="As it will be served.")
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    show_default=True,
    help="dummy: random weights, which need not be there yet.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def warm(model: str, device: str, backend: str, as_json: bool, **how: Any) -> None:
    """Fill the cache for a language model, for images and for machines that are to start quickly.

    MODEL is loaded, traced, compiled, recorded and checked as by piecegraph.LLM with the same arguments, and closed.
    Ends with 0 if the next start finds it.
    """
    import piecegraph
    from piecegraph.base.cache_root import is_on
    from piecegraph.base.text import to_json

    if not is_on():
        raise CacheError("PG673", "nothing is kept", why="PIECEGRAPH_CACHE is off", hint="name a folder")
    chosen = ("inductor" if is_gpu(device) else "eager") if backend == "auto" else backend
    with piecegraph.LLM(model, device=device, backend=chosen, **how) as llm:
        decision = next((each for each in llm.started.decisions if each.subject == "cache"), None)
        stages = dict(llm.started.stages)
    assert decision is not None, "the cache is on"
    if decision.choice == "off":
        raise CacheError("PG673", f"{model} is not kept", why=decision.reason)
    if as_json:
        click.echo(to_json({"model": model, "was": decision.choice, "why": decision.reason, "stages_s": stages}))
        return
    click.echo(str(decision))
    click.echo(", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stages.items()))
