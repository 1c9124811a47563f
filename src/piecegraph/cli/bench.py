"""``piecegraph bench``: a model in several modes side by side, and a server under load."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from piecegraph.cli.script import printing_to_stderr

if TYPE_CHECKING:
    from piecegraph.bench.result import BenchResult

_INTERRUPTED, _FELL_BACK = 130, 3
_MODEL_ONLY = ("output_len", "load_format", "dtype", "tensor_parallel_size")
"""Options that a module has no use for."""


class _Names(click.ParamType):  # type: ignore[type-arg]
    """A comma list."""

    name = "LIST"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        return value if isinstance(value, tuple) else tuple(part.strip() for part in value.split(",") if part.strip())


class _Sizes(_Names):
    """A comma list of positive integers."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        names = super().convert(value, param, ctx)
        if isinstance(value, tuple):  # left out
            return value
        if not names or not all(part.isascii() and part.isdigit() and int(part) > 0 for part in names):
            self.fail(f"{value!r} is no list of positive integers, such as 1,8,64.", param, ctx)
        return tuple(map(int, names))


class _Bench(click.Command):
    """``bench MODEL``; and ``bench serve URL``, which has options of its own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["serve"]:
            return bench_serve.make_context(f"{info_name} serve", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_Bench, short_help="Measure a model in several modes, or a server under load.")
@click.argument("model", required=False)
@click.option("--batch-size", type=_Sizes(), default=(), help="Prompts at once.  [1,8,64; 4 on a CPU]")
@click.option("--input-len", type=_Sizes(), default=(), help="Tokens of each.  [128,1024; 64 on a CPU]")
@click.option("--output-len", metavar="N", type=click.IntRange(min=2), help="New tokens of each.  [32; 16 on a CPU]")
@click.option("--modes", type=_Names(), default=(), help="Some of the six: eager,full.  [all]")
@click.option(
    "--repeats", metavar="N", type=click.IntRange(min=1), default=7, show_default=True, help="Samples of each figure."
)
@click.option("--module", metavar="PKG.MOD:FUNC", help="Any module instead of MODEL, by its factory.")
@click.option("--load-format", type=click.Choice(["auto", "dummy"]), default="auto", help="dummy: random weights.")
@click.option("--dtype", default="auto", help="Of the weights: bfloat16.  [auto]")
@click.option("--device", default="auto", help="Such as cuda:1 or cpu.  [auto]")
@click.option("--tensor-parallel-size", metavar="N", type=click.IntRange(min=1), help="GPUs of a model.  [torchrun's]")
@click.option("--compare", nargs=2, type=click.Path(path_type=Path), metavar="A B", help="Compare two saved results.")
@click.option("--strict", is_flag=True, help="End with 3 if anything did not run as asked.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "-o", "--output", "outputs", multiple=True, type=click.Path(path_type=Path), help="Write .json, .md or .html."
)
def bench(
    model: str | None,
    module: str | None,
    compare: tuple[Path, Path] | None,
    strict: bool,
    as_json: bool,
    outputs: tuple[Path, ...],
    **sweep: Any,
) -> None:
    """Measure MODEL: eager, torch.compile and piecegraph, each compared with eager first.

    MODEL is a folder, a name that transformers can find, or a shape with random weights: tiny, qwen3-0.6b, llama-1b,
    llama-8b, qwen3-30b-a3b, qwen3-next-tiny, gpt-oss-tiny. For a server: piecegraph bench serve --help.

    \b
    piecegraph bench tiny
    piecegraph bench qwen3-0.6b --batch-size 1,8 --modes eager,full -o run.json
    """
    if (model is not None) + (module is not None) + (compare is not None) != 1:
        raise click.UsageError("Give MODEL, --module or --compare: one of them.")
    without = sweep if compare is not None else _MODEL_ONLY if module is not None else ()
    if wrong := [name for name in without if _is_given(name)]:
        raise click.UsageError(f"--{wrong[0].replace('_', '-')} needs a model.")
    if compare is not None:
        _compare(*compare, as_json=as_json)
        return
    try:
        result = _measure(model or module or "", sweep, outputs, is_module=module is not None, as_json=as_json)
    except KeyboardInterrupt:
        click.echo(err=True)
        sys.exit(_INTERRUPTED)
    if strict and result.losses:
        sys.exit(_FELL_BACK)


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _measure(
    model: str, sweep: dict[str, Any], outputs: tuple[Path, ...], *, is_module: bool, as_json: bool
) -> BenchResult:
    from piecegraph.base.progress import Progress
    from piecegraph.bench.config import resolve
    from piecegraph.bench.ranks import is_first
    from piecegraph.bench.run import run
    from piecegraph.bench.show import as_text, check_output, config_table, write

    for path in outputs:
        check_output(path)
    for option, name in (("batch_size", "batch_sizes"), ("input_len", "input_lens")):
        sweep[name] = sweep.pop(option)
    config, decisions = resolve(model, is_module=is_module, **sweep)
    prints = is_first()
    if prints:
        click.echo(f"{config_table(decisions)}\n", err=as_json)
    with printing_to_stderr() if as_json else contextlib.nullcontext():
        result = run(config, decisions, Progress("auto" if prints else False))
    if prints:
        for path in outputs:
            write(result, path)
        click.echo(result.to_json() if as_json else as_text(result))
    return result


def _compare(before: Path, after: Path, *, as_json: bool) -> None:
    from dataclasses import asdict

    from piecegraph.base.text import to_json
    from piecegraph.bench.compare import compare_results, comparison_text
    from piecegraph.bench.result import read_result

    found = compare_results(read_result(before), read_result(after))
    click.echo(to_json(asdict(found)) if as_json else comparison_text(found))


@click.command("serve")
@click.argument("url")
@click.option("--workload", type=click.Choice(["chat", "long", "tiny"]), default="chat", show_default=True,
              help="Lengths of prompts and answers.")  # fmt: skip
@click.option("--requests", metavar="N", type=click.IntRange(min=1), help="How many.  [as many as the workload has]")
@click.option(
    "--concurrency",
    metavar="N",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Open at once at most.",
)
@click.option(
    "--rate", metavar="N", type=click.FloatRange(0, min_open=True), help="Requests a second.  [as fast as it answers]"
)
@click.option(
    "--processes",
    metavar="N",
    type=click.IntRange(min=1),
    help="Of the client.  [1 to 4, by --concurrency and cores]",
)
@click.option(
    "--warm-up", metavar="N", type=click.IntRange(min=0), default=0, show_default=True, help="Requests sent before."
)
@click.option("--model", help="As the server calls it.  [its first]")
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of full length, where the server knows that.")
@click.option(
    "--seed", metavar="N", type=click.IntRange(min=0), default=0, show_default=True, help="Of prompts and moments."
)
@click.option("--timeout", metavar="N", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True,
              help="Seconds without an answer.")  # fmt: skip
@click.option("--api-key", envvar="PIECEGRAPH_API_KEY", default="", help="To bring. [env: PIECEGRAPH_API_KEY]")
@click.option("--strict", is_flag=True, help="End with 3 if a request was not answered.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it to a file, too: .json.")
def bench_serve(
    url: str,
    workload: str,
    requests: int | None,
    warm_up: int,
    model: str | None,
    timeout: float,
    api_key: str,
    strict: bool,
    as_json: bool,
    output: Path | None,
    **load: Any,
) -> None:
    """Send a workload to a server that speaks OpenAI's API, and tell what its users would see.

    \b
    piecegraph bench serve http://127.0.0.1:8000 --requests 200 --concurrency 32
    piecegraph bench serve http://127.0.0.1:8000 --workload long --rate 2
    """
    from piecegraph.bench.client import Client
    from piecegraph.bench.load import as_text, prepare, run_load
    from piecegraph.bench.show import check_output, config_table

    if output is not None:
        check_output(output, (".json",))
    prepared = prepare(
        Client(url, api_key=api_key, timeout_s=timeout), workload, num_requests=requests, model=model, **load
    )
    click.echo(f"{config_table(prepared.decisions)}\n", err=as_json)
    try:
        if warm_up:
            run_load(replace(prepared, num_requests=warm_up, seed=prepared.seed + 1))
        result = run_load(prepared)
    except KeyboardInterrupt:
        click.echo(err=True)
        sys.exit(_INTERRUPTED)
    if output is not None:
        output.write_text(result.to_json())
    click.echo(result.to_json() if as_json else as_text(result))
    if result.num_whole == 0:
        sys.exit(1)
    if strict and result.num_whole < result.num_requests:
        sys.exit(_FELL_BACK)
