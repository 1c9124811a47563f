"""``piecegraph run``: a command with a recorder in every Python process it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from piecegraph.cli.known import known_option, users_files
from piecegraph.errors import CommandError

if TYPE_CHECKING:
    from piecegraph.explain.known_issues import KnownIssue
    from piecegraph.explain.page import Page


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the records, and the page as page.txt, .md, .html and .json, in a new folder inside this one.",
)
@known_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(out: Path | None, known: tuple[Path, ...], command: tuple[str, ...]) -> None:
    """Run COMMAND, and if it fails, print on one page why.

    Every Python process that COMMAND starts records how it ends. Output, input, signals and the exit code are the
    command's own; after a success nothing is added.
    """
    from piecegraph.explain.catalogue import load_catalogue
    from piecegraph.explain.run.recorded_run import fresh_folder, private_folder

    catalogue = load_catalogue(users_files(known))  # a wrong file is told before the command has run for hours
    if out is not None:
        code = _run(command, fresh_folder(out), catalogue, is_kept=True)
    else:
        with private_folder() as records:
            code = _run(command, records, catalogue, is_kept=False)
    sys.exit(code)


def _run(command: tuple[str, ...], records: Path, catalogue: Sequence[KnownIssue], *, is_kept: bool) -> int:
    from piecegraph.explain.page import compose
    from piecegraph.explain.render import to_text
    from piecegraph.explain.run.recorded_run import run_recorded

    done = run_recorded(command, records, os.environ)
    if done.evidence is not None:
        page = compose(done.evidence, catalogue)
        click.echo(f"\npiecegraph run: the command ended with exit code {done.ended.exit_code}", err=True)
        if done.problem is not None:
            click.echo(f"warning: {done.problem}", err=True)
        click.echo(to_text(page), err=True, nl=False)
        if is_kept:
            _keep(page, records)
    return done.ended.exit_code


def _keep(page: Page, records: Path) -> None:
    from piecegraph.base.text import to_json
    from piecegraph.explain.as_json import to_dict
    from piecegraph.explain.render import to_markdown, to_text
    from piecegraph.explain.report_page import to_html

    texts = {"txt": to_text(page), "md": to_markdown(page), "html": to_html(page), "json": to_json(to_dict(page))}
    try:
        for suffix, text in texts.items():
            (records / f"page.{suffix}").write_text(text, encoding="utf-8")
    except OSError as error:
        why = error.strerror or str(error)
        click.echo(
            f"warning: {CommandError('PG613', 'the page cannot be kept', where=str(records), why=why)}", err=True
        )
    click.echo(f"records: {records}", err=True)
