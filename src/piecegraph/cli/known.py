"""Where a user keeps known issues of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

known_option = click.option(
    "--known",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Known issues of your own: a TOML file. May be given several times.",
)


def users_folder() -> Path:
    """The folder whose files of known issues are always read: the platform's for settings, ``known`` inside of it."""
    return Path(click.get_app_dir("piecegraph")) / "known"


def users_files(given: Sequence[Path]) -> tuple[Path, ...]:
    """The files of known issues of a user: those of their folder, and those that were given."""
    from piecegraph.explain.catalogue import files_of_folder

    return (*files_of_folder(users_folder()), *given)
