"""Kernels: who launches those of Triton, and their names."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


@functools.cache
def triton_launchers() -> tuple[Any, ...]:
    """The classes whose ``run`` launches a Triton kernel. Finding them imports Inductor: not for during a capture."""
    if not torch.cuda.is_available():
        return ()
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    with contextlib.suppress(ImportError):
        return CachingAutotuner, importlib.import_module("triton.runtime.jit").JITFunction
    return (CachingAutotuner,)


AroundLaunch = Callable[[str], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def triton_launches(around: AroundLaunch) -> Iterator[None]:
    """Launches of Triton kernels by this thread, by Inductor's code or directly, happen inside of ``around(name)``.

    They are no ops, so that no dispatch mode sees them. Inductor of torch 2.11 and 2.13 launches by a plain method.
    """
    with contextlib.ExitStack() as undo:
        for launcher in triton_launchers():
            undo.callback(setattr, launcher, "run", launcher.run)
            launcher.run = _watched_launch(launcher.run, around, threading.get_ident())
        yield


def _watched_launch(run: Callable[..., Any], around: AroundLaunch, thread: int) -> Callable[..., Any]:
    @functools.wraps(run)
    def watched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or kwargs.get("warmup"):
            return run(kernel, *args, **kwargs)
        with around(kernel.fn.__name__):
            return run(kernel, *args, **kwargs)

    return watched


def demangle(name: str) -> str:
    """A C++ name as it was written; the name itself if torch cannot read it: it knows no ``std::bfloat16_t``."""
    return str(torch._C._demangle(name))
