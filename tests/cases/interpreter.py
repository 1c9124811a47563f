"""Triton's interpreter on the CPU. It is chosen when Triton is imported, for the whole process, so cases run in one of
their own, which prints a line for each.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def why_not() -> str:
    """Why the interpreter cannot run here, if it cannot."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return "the interpreter of Triton 3.6 does not work with NumPy 2.4" if triton < (3, 7) and numpy >= (2, 4) else ""


needs_interpreter = pytest.mark.skipif(bool(why_not()), reason=why_not())


def verdicts_of(module: str) -> dict[str, str]:
    """What :func:`print_verdicts` prints in a module that is run as a program."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(line.split(" = ", 1) for line in done.stdout.splitlines())


def print_verdicts(jobs: Mapping[str, Callable[[], None]]) -> None:
    """Run every case and print its verdict."""
    with _patched_once_a_launch():
        for name, job in jobs.items():
            try:
                job()
            except Exception as error:
                print(name, "=", f"{type(error).__name__}: {error}".replace("\n", " "))
            else:
                print(name, "=", "right")


@contextmanager
def _patched_once_a_launch() -> Iterator[None]:
    """The interpreter replaces what Triton's language means for a kernel, and the same things again for each call of a
    function in it, which takes a third of its time. Here it does so once for each module in a launch.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_lang, patched = interpreter._patch_lang, set[int]()

    def patch_once(kernel: Any) -> Any:
        if id(kernel.__globals__) in patched:
            return None  # a function that a kernel calls: nobody looks at what is returned
        is_launch = not patched
        patched.add(id(kernel.__globals__))
        scope = patch_lang(kernel)
        if is_launch:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once
    try:
        yield
    finally:
        interpreter._patch_lang = patch_lang
