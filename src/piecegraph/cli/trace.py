"""``piecegraph trace``: which line launched which kernel, of a model, a script or a recorded trace."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from piecegraph.base.patterns import parse_line
from piecegraph.base.progress import is_terminal
from piecegraph.cli.loading import is_gpu, load_model, model_options
from piecegraph.cli.script import FAILED, ScriptFailedError, printing_to_stderr, run_script
from piecegraph.cli.what_if import PartCost, measure_parts, parts_document, parts_view, require_gpu
from piecegraph.errors import InputError
from piecegraph.provenance.tables.table import SORTS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from piecegraph.llm.llm import LLM
    from piecegraph.provenance.tables.table import Table
    from piecegraph.provenance.trace import Trace

_INTERRUPTED = 130
_MODEL_ONLY = ("prompt", "prompt_tokens", "max_new_tokens", "dtype", "device", "backend", "load_format", "what_if")
_SELECTION = ("sort", "module", "op", "kernel", "line")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A trace, what more was measured, and how the program ended."""

    taken: Trace
    name: str
    """Of what was traced."""
    parts: tuple[PartCost, ...] = ()
    exit_code: int = 0
    llm: LLM | None = None
    """The model whose answer was traced."""

    def save(self, path: Path) -> None:
        """A report has a title, and says of a model how it runs, too."""
        if path.suffix != ".html":
            self.taken.save(path)
        elif self.llm is not None:
            self.llm.report(path, trace=self.taken)
        else:
            from piecegraph.report.page import write_report

            write_report(self.taken.as_report(f"Trace of {self.name}"), path)


@click.command()
@click.argument("target", required=False)
@click.argument("arguments", nargs=-1, metavar="[ARGS]...")
@click.option("--from", "recorded", metavar="TRACE", help="Read what torch.profiler wrote: .json or .json.gz.")
@click.option("--prompt", default="The capital of France is", show_default=True, help="What MODEL goes on from.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), help="As many arbitrary tokens instead of a prompt.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=8, show_default=True, help="Of MODEL's answer.")
@model_options
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    show_default=True,
    help="dummy: random weights.",
)
@click.option("--what-if", multiple=True, metavar="GLOB", help="What a step of MODEL costs without these modules.")
@click.option("--limit", type=click.IntRange(min=0), default=30, show_default=True, help="Rows to show; 0: all.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="total", show_default=True, help="By this column.")
@click.option("--module", metavar="GLOB", help="Only these modules and what is inside: layers.*.mlp.")
@click.option("--op", metavar="GLOB", help="Only these calls: aten::mm.")
@click.option("--kernel", metavar="GLOB", help="Only these kernels: nvjet*.")
@click.option("--line", metavar="FILE[:LINE]", help="Only what these lines launch: model.py:12.")
@click.option("--row", type=click.IntRange(min=1), help="Look into this row: its places, stacks and launches.")
@click.option("--groups", "with_groups", is_flag=True, help="Show the kernels that come from one call, too.")
@click.option("--diff", "earlier", metavar="TRACE", help="Show what changed since this saved trace instead.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of tables.")
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Save the whole trace: .html to look into, .txt, .csv, .json, .md, or .trace.json[.gz] for Perfetto and "
    "--diff. Repeatable.",
)
@click.pass_context
def trace(
    context: click.Context,
    /,
    target: str | None,
    arguments: tuple[str, ...],
    recorded: str | None,
    earlier: str | None,
    outputs: tuple[Path, ...],
    as_json: bool,
    with_groups: bool,
    row: int | None,
    limit: int,
    **rest: Any,
) -> None:
    """Find out which line of Python launched every kernel, and what it cost.

    TARGET is a script (script.py), run as Python would run it, with options of its own behind "--"; or a model, as for
    "piecegraph generate", whose answer to a prompt is traced after it is warm. With --from there is no TARGET.

    Ends as the script does; with 1 if it or the model failed, and with 2 if an option, a file or a selection cannot be
    used.
    """
    _check_usage(context, target, arguments, recorded)
    how = {name: rest[name] for name in _MODEL_ONLY}
    selection = {name: rest[name] for name in _SELECTION}
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch's profiler prints a line when it starts, and one later
    _check_files(outputs, selection["line"])
    try:
        before = None if earlier is None else _open(earlier)
        with printing_to_stderr() if as_json else contextlib.nullcontext():
            seen = _see(target, arguments, recorded, how)
        for path in outputs:
            seen.save(path)
            click.echo(path, err=True)
        _show(seen, selection, before, limit or None, row, as_json=as_json, with_groups=with_groups)
    except ScriptFailedError as failed:
        _save_failure(failed, str(target), [path for path in outputs if path.suffix == ".html"])
        sys.exit(FAILED)
    except KeyboardInterrupt:
        click.echo(err=True)
        sys.exit(_INTERRUPTED)
    sys.exit(seen.exit_code)


# ------------------------------------------------------------------ what can be told at once


def _check_usage(context: click.Context, target: str | None, arguments: tuple[str, ...], recorded: str | None) -> None:
    if (target is None) == (recorded is None):
        raise click.UsageError("Give a script or a model, or --from and a trace: one of them.")
    is_model = target is not None and not target.endswith(".py")
    if is_model and arguments:
        raise click.UsageError(
            f"A model takes no arguments, but got {arguments[0]!r}; the prompt is given by --prompt."
        )
    if context.params["prompt_tokens"] is not None and _given(context, ("prompt",)):
        raise click.UsageError("Give --prompt or --prompt-tokens: one of them.")
    if not is_model and (wrong := _given(context, _MODEL_ONLY)):
        raise click.UsageError(f"{wrong} needs a model as TARGET.")
    if context.params["earlier"] is not None and (wrong := _given(context, (*_SELECTION, "row"))):
        raise click.UsageError(f"--diff compares whole traces: leave {wrong} out.")


def _given(context: click.Context, names: tuple[str, ...]) -> str:
    """The first of these options that was written down; empty if none was."""
    written = (name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT)
    return next((f"--{name.replace('_', '-')}" for name in written), "")


def _check_files(outputs: tuple[Path, ...], line: str | None) -> None:
    """What would fail after the run is told before it."""
    from piecegraph.provenance.trace import ending_of

    if line is not None:
        parse_line(line)
    for path in outputs:
        ending_of(path)
        if not path.parent.is_dir():
            raise InputError("PG601", f"{path} cannot be written", why="there is no such folder", hint="make it first")


# ------------------------------------------------------------------ what runs


def _see(target: str | None, arguments: tuple[str, ...], recorded: str | None, how: dict[str, Any]) -> _Seen:
    if recorded is not None:
        return _Seen(_open(recorded), recorded)
    assert target is not None, "usage is checked"
    return _see_script(target, arguments) if target.endswith(".py") else _see_model(target, **how)


def _open(path: str) -> Trace:
    from piecegraph.provenance.trace import open_trace

    return open_trace(path)


def _see_script(path: str, arguments: tuple[str, ...]) -> _Seen:
    from piecegraph.provenance.trace import trace as tracing

    if not os.path.isfile(path):
        raise InputError("PG601", f"{path} cannot be read", why="there is no such file")
    with tracing() as taken:
        code = run_script(path, arguments)
    return _Seen(taken, path, exit_code=code)


def _see_model(
    model: str, *, prompt: str, prompt_tokens: int | None, max_new_tokens: int, what_if: tuple[str, ...], **how: Any
) -> _Seen:
    from piecegraph.provenance.trace import trace as tracing

    if what_if:
        require_gpu(model, is_gpu=is_gpu(how["device"]))
    # Without reuse of what the warm-up computed, both runs do the same.
    llm = load_model(model, num_prompts=1, prefix_cache=False, options={"provenance": True}, **how)
    for glob in what_if:
        llm.kernels.select(module=glob)  # a glob that means nothing is told before anything runs
    asked = prompt if prompt_tokens is None else _arbitrary_tokens(llm, prompt_tokens)
    _answer(llm, asked, max_new_tokens)
    with tracing() as taken:
        _answer(llm, asked, max_new_tokens)
    return _Seen(taken, model, tuple(measure_parts(llm.kernels, taken, what_if)) if what_if else (), llm=llm)


def _arbitrary_tokens(llm: LLM, number: int) -> list[int]:
    vocab_size = llm.started.engine.scheduler.limits.vocab_size
    return [token % vocab_size for token in range(number)]


def _answer(llm: LLM, prompt: str | list[int], max_new_tokens: int) -> None:
    llm.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)


def _save_failure(failed: ScriptFailedError, script: str, paths: list[Path]) -> None:
    """There is no trace of a script that failed; a report says why."""
    if not paths:
        return
    from piecegraph.explain.catalogue import load_catalogue
    from piecegraph.explain.from_logs import explain_text
    from piecegraph.explain.report_page import to_report
    from piecegraph.report.page import write_report

    text = "".join(traceback.format_exception(failed.__cause__))
    report = replace(to_report(explain_text(text, load_catalogue())), about=script)
    for path in paths:
        click.echo(write_report(report, path), err=True)


# ------------------------------------------------------------------ what is shown


def _show(
    seen: _Seen,
    selection: dict[str, Any],
    before: Trace | None,
    limit: int | None,
    row: int | None,
    *,
    as_json: bool,
    with_groups: bool,
) -> None:
    from piecegraph.provenance.show.row import find_row, row_text
    from piecegraph.provenance.show.text import WIDTH, diff_view, groups_view, table_view

    table = seen.taken.table(**selection)
    if row is not None:
        table = replace(table, rows=(find_row(table, row),))
    if as_json:
        _print_document(seen, table, before)
        return
    if row is not None:
        click.echo(row_text(table.rows[0]))
        return
    width = _terminal_width() or WIDTH
    views = [table_view(table, width=width, limit=limit)]
    if before is not None:
        views = [diff_view(before.diff(seen.taken), width=width, limit=limit)]
    if with_groups:
        views.append(groups_view(seen.taken.groups()))
    if seen.parts:
        views.append(parts_view(seen.parts))
    _print(views, width)


def _print_document(seen: _Seen, table: Table, before: Trace | None) -> None:
    from piecegraph.base.text import to_json
    from piecegraph.provenance.show.json_document import diff_document

    found = seen.taken.document(table)
    if before is not None:
        found["diff"] = diff_document(before.diff(seen.taken))
    if seen.parts:
        found["what_if"] = parts_document(seen.parts)
    click.echo(to_json(found))


def _terminal_width() -> int | None:
    """None if standard output is no terminal."""
    from rich.console import Console

    from piecegraph.provenance.show.columns import GAP

    return Console().width - GAP if is_terminal(sys.stdout) else None


def _print(views: list[RenderableType], width: int) -> None:
    from rich.console import Console

    from piecegraph.provenance.show.text import plain_text

    for number, view in enumerate(views):
        if number:
            click.echo()
        if is_terminal(sys.stdout):
            Console(highlight=False).print(view)
        else:
            click.echo(plain_text(view, width))
