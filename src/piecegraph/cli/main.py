"""The entry point: the group, and how errors leave it."""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Any

import click

from piecegraph.base.job import leave_job
from piecegraph.base.version import VERSION
from piecegraph.cli.bench import bench
from piecegraph.cli.cache import cache
from piecegraph.cli.doctor import doctor
from piecegraph.cli.env import env
from piecegraph.cli.explain import explain
from piecegraph.cli.generate import generate
from piecegraph.cli.loading import this_rank
from piecegraph.cli.run import run
from piecegraph.cli.serve import serve
from piecegraph.cli.trace import trace
from piecegraph.cli.warm import warm
from piecegraph.errors import InputError, PiecegraphError, RankError


class _Group(click.Group):
    """Commands whose output somebody may stop reading (``| head``), which is no failure of theirs."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            if not _is_of_output(error):
                raise
            _close_output()
            ctx.exit(0)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="piecegraph")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def group(debug: bool) -> None:
    """Piecewise CUDA graphs for any PyTorch model."""
    if this_rank():  # what transformers warns of, the first rank tells for all; it asks when it is imported
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


group.add_command(bench)
group.add_command(cache)
group.add_command(doctor)
group.add_command(env)
group.add_command(explain)
group.add_command(generate)
group.add_command(run)
group.add_command(serve)
group.add_command(trace)
group.add_command(warm)


def main() -> None:
    """Run the command. Our own errors are one line on standard error; the exit code is 1, or 2 for a wrong call."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone shows question marks
    try:
        group()
    except PiecegraphError as error:
        _end(error)
    except OSError as error:
        if not _is_of_output(error):
            raise
        _close_output()
        why, hint = (error.strerror or str(error)).lower(), "write to another place"
        _end(InputError("PG601", "standard output cannot be written", why=why, hint=hint))
    finally:
        leave_job()


def _end(error: PiecegraphError) -> None:
    if "--debug" in sys.argv:
        raise error
    # One rank tells what it is for all: the first, unless it is the one that is gone.
    if this_rank() == (1 if isinstance(error, RankError) and error.rank == 0 else 0):
        click.echo("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), err=True)
    sys.exit(error.exit_code)


def _close_output() -> None:
    """Let what is still to be written go nowhere, or Python would fail once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_of_output(error: OSError) -> bool:
    """Whether it was raised by what prints, and not by a file that somebody else writes."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    return str(last.f_globals["__name__"]).partition(".")[0] in ("click", "rich")
