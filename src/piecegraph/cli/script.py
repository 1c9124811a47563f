"""Runs a script inside this process as ``python script.py ARGS`` would."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType

import click

FAILED = 1


class ScriptFailedError(Exception):
    """The script ended with an exception; its traceback was shown."""


def run_script(path: str, arguments: Sequence[str]) -> int:
    """Run a script, and return its exit code.

    Raises:
        ScriptFailedError: after an exception of the script.
    """
    with _as_program(path, arguments):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as ended:
            return _exit_code(ended)
        except Exception as error:  # whatever the script raises, Python would show it and end
            own = _from_script_on(error.__traceback__, path)
            sys.excepthook(type(error), error.with_traceback(own), own)
            raise ScriptFailedError from error
    return 0


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """What is printed inside goes to standard error; that of programs that are started inside, too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _as_program(path: str, arguments: Sequence[str]) -> Iterator[None]:
    argv, first = sys.argv, sys.path[0]
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[0] = first


def _exit_code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return int(ended.code or 0)
    click.echo(ended.code, err=True)
    return FAILED


def _from_script_on(at: TracebackType | None, path: str) -> TracebackType | None:
    """Without what called the script; None if none of its lines ran."""
    while at is not None and at.tb_frame.f_code.co_filename != path:
        at = at.tb_next
    return at
