"""``piecegraph explain``: a failing run's logs on one page."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from piecegraph.base.progress import is_terminal
from piecegraph.cli.known import known_option, users_files
from piecegraph.errors import InputError

if TYPE_CHECKING:
    from piecegraph.explain.page import Page


@click.command()
@click.argument("logs", metavar="LOG...", nargs=-1, type=click.Path())
@click.option("--follow", is_flag=True, help="Pass standard input on as it comes, and print the page when it ends.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a page.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a page: .html, .md, .json or .txt.")
@known_option
@click.option("--list", "list_issues", is_flag=True, help="List the known issues and their rules.")
@click.option(
    "--check", type=click.Path(path_type=Path), help="Try out a file of known issues and its examples, and no log."
)
@click.option("--schema", is_flag=True, help="Print the JSON schema of --json.")
def explain(
    logs: tuple[str, ...],
    follow: bool,
    as_json: bool,
    output: Path | None,
    known: tuple[Path, ...],
    list_issues: bool,
    check: Path | None,
    schema: bool,
) -> None:
    """Say on one page why a run failed.

    LOG is what the run printed: a file, plain or gzipped, or - for standard input. Give several where each process
    wrote its own.
    """
    if schema:
        click.echo(_schema())
    elif check is not None:
        _check(check, known)
    elif list_issues:
        _list(users_files(known))
    else:
        if output is not None and output.suffix not in _FORMATS:
            raise click.BadParameter(f"{output.name}: use one of {', '.join(_FORMATS)}", param_hint="-o")
        page = _follow(logs, users_files(known), as_json) if follow else _read(logs, users_files(known))
        _show(page, as_json, output, sys.stderr if follow else sys.stdout)


def _read(logs: Sequence[str], known: Sequence[Path]) -> Page:
    if not logs and (sys.stdin is None or is_terminal(sys.stdin)):
        raise click.UsageError("give the path of a log, or pipe one in.")
    from piecegraph.explain.from_logs import explain_logs

    return explain_logs(logs or ["-"], known=known)


def _follow(logs: Sequence[str], known: Sequence[Path], as_json: bool) -> Page:
    """The page of a job that is still running. Its output goes where the page does not."""
    if logs or sys.stdin is None or is_terminal(sys.stdin):
        raise click.UsageError("--follow reads standard input: pipe the job in, and give no LOG.")
    from piecegraph.explain.catalogue import load_catalogue
    from piecegraph.explain.follow import FollowedJob, signals_end
    from piecegraph.explain.from_logs import explain_stream

    catalogue = load_catalogue(known)  # a wrong file is told before the job has run for hours
    passed_to = sys.stderr if as_json else sys.stdout
    job = FollowedJob(sys.stdin.fileno(), passed_to.fileno() if passed_to is not None else None)
    with signals_end(job):
        try:
            return explain_stream(job, catalogue)
        finally:
            job.drain()
            if job.refusal:
                click.echo(f"warning: not all output could be passed on: {job.refusal}", err=True)


def _show(page: Page, as_json: bool, output: Path | None, pages: TextIO) -> None:
    if output is not None:
        _write(page, output)
    if as_json:
        click.echo(_as_json(page))
    elif output is None:
        from piecegraph.explain.render import to_text

        is_coloured = is_terminal(pages) and "NO_COLOR" not in os.environ
        click.echo(to_text(page, colour=is_coloured), file=pages, nl=False)
    else:
        click.echo(f"{output}", err=True)


def _list(known: Sequence[Path]) -> None:
    from piecegraph.explain.catalogue import load_catalogue
    from piecegraph.explain.known_issues import describe

    click.echo("\n\n".join(describe(issue) for issue in load_catalogue(known)))


def _check(path: Path, known: Sequence[Path]) -> None:
    from piecegraph.explain.check import check_file

    others = [other for other in users_files(known) if other.resolve() != path.resolve()]
    checked = check_file(path, others)
    for entry in checked.entries:
        click.echo(entry)
    for problem in checked.problems:
        click.echo(f"error: {problem}", err=True)
    sys.exit(1 if checked.problems else 0)


_FORMATS = (".html", ".md", ".json", ".txt")


def _schema() -> str:
    from piecegraph.base.text import to_json
    from piecegraph.explain.as_json import page_schema

    return to_json(page_schema())


def _as_json(page: Page) -> str:
    from piecegraph.base.text import to_json
    from piecegraph.explain.as_json import to_dict

    return to_json(to_dict(page))


def _write(page: Page, output: Path) -> None:
    from piecegraph.explain.render import to_markdown, to_text
    from piecegraph.explain.report_page import to_html

    writers = {".html": to_html, ".md": to_markdown, ".json": _as_json, ".txt": to_text}
    try:
        output.write_text(writers[output.suffix](page), encoding="utf-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError("PG601", f"{output} cannot be written", why=why, hint="choose another path") from error
