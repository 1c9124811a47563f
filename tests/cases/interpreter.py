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

import numpy as np
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
    with _quicker():
        for name, job in jobs.items():
            try:
                job()
            except Exception as error:
                print(name, "=", f"{type(error).__name__}: {error}".replace("\n", " "))
            else:
                print(name, "=", "right")


@contextmanager
def _quicker() -> Iterator[None]:
    """The interpreter does the same with less of its time spent on itself."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    semantic: Any = importlib.import_module("triton.language.semantic").TritonSemantic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", _once_a_launch(interpreter._patch_lang))
        patch.setattr(interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype))
        patch.setattr(semantic, "binary_op_sanitize_overflow_impl", _check_overflow)
        yield


def _remembered(find_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's types for Triton's, a block's being that of its elements. The interpreter writes a table at each call."""
    known: dict[str, Any] = {}

    def find(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find_dtype(kind)
        return known[name]

    return find


def _check_overflow(semantic: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
    """That integers do not overflow. Triton says so in a dozen ops of its own language; NumPy in three."""
    narrow = lhs.handle.data.dtype
    if narrow.itemsize < 8:
        compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
        exact = compute(lhs.handle.data, rhs.handle.data, dtype=np.int64)
        assert (exact == exact.astype(narrow)).all(), f"{narrow} overflow detected for operation {operation.__name__}"


def _once_a_launch(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter replaces what Triton's language means for a kernel, and the same things again for each call of a
    function in it, which takes a third of its time. Here it does so once for each module in a launch.
    """
    patched = set[int]()

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

    return patch_once
