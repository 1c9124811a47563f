"""``piecegraph explain``: a failing run's logs on one page."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from piecegraph.errors import InputError

if TYPE_CHECKING:
    from piecegraph.explain.page import Page


@click.command()
@click.argument("logs", metavar="LOG...", nargs=-1, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a page.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a page: .html, .md, .json or .txt.")
@click.option("--issues", type=click.Path(path_type=Path), help="Known issues of your own: a TOML file.")
@click.option("--list", "list_issues", is_flag=True, help="List the known issues and their rules.")
def explain(logs: tuple[str, ...], as_json: bool, output: Path | None, issues: Path | None, list_issues: bool) -> None:
    """Say on one page why a run failed.

    LOG is what the run printed: a file, plain or gzipped, or - for standard input. Give several where each process
    wrote its own.
    """
    if list_issues:
        from piecegraph.explain.known_issues import describe, load_catalogue

        click.echo("\n\n".join(describe(issue) for issue in load_catalogue(issues)))
        return
    if not logs and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("give the path of a log, or pipe one in.")
    from piecegraph.explain.from_logs import explain_logs

    if output is not None and output.suffix not in _FORMATS:
        raise click.BadParameter(f"{output.name}: use one of {', '.join(_FORMATS)}", param_hint="-o")
    page = explain_logs(logs or ["-"], issues=issues)
    if output is not None:
        _write(page, output)
    if as_json:
        click.echo(_as_json(page))
    elif output is None:
        from piecegraph.explain.render import to_text

        click.echo(to_text(page, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ), nl=False)
    else:
        click.echo(f"{output}", err=True)


_FORMATS = (".html", ".md", ".json", ".txt")


def _as_json(page: Page) -> str:
    from piecegraph.base.text import to_json
    from piecegraph.explain.render import to_dict

    return to_json(to_dict(page))


def _write(page: Page, output: Path) -> None:
    from piecegraph.explain.render import to_html, to_markdown, to_text

    writers = {".html": to_html, ".md": to_markdown, ".json": _as_json, ".txt": to_text}
    try:
        output.write_text(writers[output.suffix](page), encoding="utf-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError("PG601", f"{output} cannot be written", why=why, hint="choose another path") from error
