"""``piecegraph env``: what this machine has."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
def env(as_json: bool) -> None:
    """Show the versions of everything piecegraph runs on, for a bug report."""
    from piecegraph.base.environment import describe_environment
    from piecegraph.base.text import to_json

    found = describe_environment()
    if as_json:
        click.echo(to_json(found))
        return
    width = max(map(len, found))
    for name, value in found.items():
        click.echo(f"{name.ljust(width)}  {value}")
