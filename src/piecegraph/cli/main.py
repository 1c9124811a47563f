"""The entry point: the group, and how errors leave it."""

from __future__ import annotations

import sys

import click

from piecegraph.cli.doctor import doctor
from piecegraph.cli.env import env
from piecegraph.cli.explain import explain
from piecegraph.cli.generate import generate
from piecegraph.cli.run import run
from piecegraph.cli.trace import trace
from piecegraph.errors import PiecegraphError
from piecegraph.ranks import leave_job
from piecegraph.version import VERSION


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="piecegraph")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def group(debug: bool) -> None:
    """Piecewise CUDA graphs for any PyTorch model."""


group.add_command(doctor)
group.add_command(env)
group.add_command(explain)
group.add_command(generate)
group.add_command(run)
group.add_command(trace)


def main() -> None:
    """Run the command. Our own errors are one line on standard error; the exit code is 1, or 2 for unusable input."""
    try:
        group()
    except PiecegraphError as error:
        if "--debug" in sys.argv:
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    finally:
        leave_job()
