"""Kernels: who launches those of Triton, and their names."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch

from piecegraph.base.torch_compat.compilers import Compilers, compile_by_copy, num_compilers
from piecegraph.base.torch_compat.inductor import wait_for_hashes


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


_launches_nothing: ContextVar[bool] = ContextVar("launches_nothing", default=False)


@contextlib.contextmanager
def compiled_aside(device: torch.device, compilers: Compilers | None) -> Iterator[None]:
    """Triton kernels that this thread would launch are compiled and loaded instead, several at a time, each one once.

    Leaving waits for them, and raises the first error there was; the others are compiled all the same. Nothing must
    depend on what a kernel writes.

    Triton 3.6 and 3.7 compile in threads on purpose: what is slow releases the GIL. Their ``AsyncCompileMode`` is
    public, but has no launch return before its kernel is there; for that ``run`` is told that it is a warm-up.

    Args:
        device: a GPU.
        compilers: what compiles; without them, the threads do that load it.
    """
    triton: Any = importlib.import_module("triton")
    wait_for_hashes()  # each thread would begin its own
    with contextlib.ExitStack() as undo:
        pool = undo.enter_context(_KernelPool(device, compilers))
        undo.callback(setattr, triton.JITFunction, "run", triton.JITFunction.run)
        triton.JITFunction.run = _no_launch(triton.JITFunction.run)
        undo.callback(_launches_nothing.reset, _launches_nothing.set(True))
        mode = undo.enter_context(triton.AsyncCompileMode(pool, ignore_errors=True))
        yield
    for compiled in mode.raw_futures:
        compiled.result()


class _KernelPool(ThreadPoolExecutor):
    """Loads what it compiles: Triton 3.6 has a C compiler make a launcher first, which takes as long as a kernel."""

    def __init__(self, device: torch.device, compilers: Compilers | None) -> None:
        super().__init__(num_compilers(), "piecegraph kernels", torch.cuda.set_device, (device,))
        self._compilers = compilers

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        def load() -> Any:
            if self._compilers is not None:
                compile_by_copy(compile_kernel, self._compilers)
            kernel = compile_kernel()
            kernel.run  # noqa: B018 - a property that loads
            return kernel

        return super().submit(load)


def _no_launch(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def compile_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(kernel, *args, warmup=warmup or _launches_nothing.get(), **kwargs)

    return compile_only


def demangle(name: str) -> str:
    """A C++ name as it was written; the name itself if torch cannot read it: it knows no ``std::bfloat16_t``."""
    return str(torch._C._demangle(name))
