"""Processes that compile Triton's kernels, several at a time: Inductor's, and those that are launched directly.

Note [Copies that compile]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A third of what it takes to compile a kernel is Python. In threads that would be taken from Inductor, which is Python,
too. Inductor's own processes import torch first, which takes longer than to compile the kernels of a model, and until
they are up it compiles one kernel after the other. So processes are forked, and are ready at once.

Such a copy must not touch the GPU, nor need a lock that another thread held. It compiles for a GPU that is described to
it, which needs neither. It is made by the thread that is about to compile, before other threads begin to; and what a
copy does not do in time, or cannot be sent, is done here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from piecegraph.base.torch_compat.inductor import wait_for_hashes

_MOST_PROCESSES = 8
_PATIENCE = 60.0
"""Seconds that a kernel may take. The largest take three."""
_GRACE = 1.0
"""Seconds in which a copy with nothing to do is to end."""
_NEEDED = ("torch._inductor.runtime.triton_heuristics", "triton.compiler.code_generator", "triton.experimental.gluon")
"""What is imported to compile a first kernel."""


@dataclass(frozen=True)
class _Job:
    """What a copy does; done here if it cannot."""

    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    give_up: Callable[[], None]

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.future.result(_PATIENCE if timeout is None else timeout)
        except TimeoutError:
            self.give_up()  # the others would take as long
        except (BrokenExecutor, CancelledError, pickle.PicklingError, AttributeError, TypeError):
            pass
        return self.function(*self.args)

    def done(self) -> bool:
        return self.future.done()


def num_compilers() -> int:
    """How many kernels are compiled at a time, at most as many as Inductor may. There may be two who do."""
    from torch._inductor.async_compile import get_compile_threads

    return max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2, get_compile_threads()))


class Compilers:
    """Copies of this process. See Note [Copies that compile]."""

    def __init__(self) -> None:
        # What each of them would do for itself.
        wait_for_hashes()
        for name in _NEEDED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(num_compilers(), context, _begin_copy, (os.getpid(),))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, that there are threads
            try:
                self._pool.submit(int)  # the first job forks all of them
            except OSError:
                self.close()
                raise

    def submit(self, job: Callable[..., Any], /, *args: Any) -> _Job:
        from torch._inductor.runtime.compile_tasks import _worker_compile_triton

        function = _compile_of_inductor if job is _worker_compile_triton else job
        try:
            future = self._pool.submit(function, *args)
        except RuntimeError as error:  # one of them died, or took too long
            future = Future()
            future.set_exception(BrokenExecutor(str(error)))
        return _Job(future, job, args, self.close)

    def close(self) -> None:
        """Have them end, without waiting for it. One that waits for a lock would never, and is killed."""
        copies = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=_end, args=(copies,), name="piecegraph end of copies", daemon=True).start()


def _end(copies: list[Any]) -> None:
    """Kill those that do not end. Whether one has is asked of its pipe: the pool waits for it, and nobody else can."""
    deadline = time.monotonic() + _GRACE
    for copy in copies:
        if not wait([copy.sentinel], max(0.0, deadline - time.monotonic())):
            copy.kill()


def fork_compilers() -> Compilers | None:
    """None where there may be no copies, or the system has no room for them.

    Not of a daemon of multiprocessing, and not where Inductor is to have no processes.
    """
    from torch._inductor.async_compile import get_compile_threads

    if not hasattr(os, "fork") or multiprocessing.current_process().daemon or get_compile_threads() <= 1:
        return None
    with contextlib.suppress(OSError):
        return Compilers()
    return None


_replacing = threading.RLock()
"""Held while Inductor's class is patched, so that two threads do not undo each other's patch."""
_compilers_of_inductor: list[Compilers] = []


@contextlib.contextmanager
def inductor_compilers() -> Iterator[None]:
    """Triton kernels of graphs that Inductor compiles inside are compiled by copies of this process.

    Torch 2.11 to 2.13 ask a cached static method for the pool, and a future whether it is up.
    """
    from torch._inductor.async_compile import AsyncCompile

    with _replacing, contextlib.ExitStack() as undo:
        pool = None if _compilers_of_inductor else fork_compilers()
        if pool is not None:
            undo.callback(pool.close)
            _compilers_of_inductor.append(pool)
            undo.callback(_compilers_of_inductor.clear)
            is_ready: Future[None] = Future()
            is_ready.set_result(None)
            ask_for_pool = staticmethod(functools.cache(lambda: pool))
            for name, value in ("process_pool", ask_for_pool), ("_ready_future", is_ready):
                undo.callback(setattr, AsyncCompile, name, AsyncCompile.__dict__[name])
                setattr(AsyncCompile, name, value)
        yield


def compile_by_copy(compile_kernel: Callable[[], Any], compilers: Compilers) -> None:
    """Have a copy do what a job of Triton's ``AsyncCompileMode`` is to do, which finds it in Triton's folder then.

    What goes wrong, goes wrong again in the job itself, or only took its time.

    Triton 3.6 and 3.7: the job closes over a kernel of a module, and all that it is compiled for. The kind of source is
    that of Triton or of Gluon.
    """
    job = inspect.getclosurevars(compile_kernel).nonlocals
    kernel, source = job["src"].fn, job["src"]
    how = {"target": job["target"], "options": job["options"].__dict__, "_env_vars": job["env_vars"]}
    what = source.signature, source.constants, source.attrs
    place = {name: os.environ[name] for name in ("TRITON_CACHE_DIR",) if name in os.environ}
    with contextlib.suppress(Exception):
        job_of_copy = type(source), kernel.fn.__module__, kernel.fn.__qualname__, what, how, place
        compilers.submit(_compile_source, *job_of_copy).result()


def _compile_source(
    kind: Any, module: str, name: str, what: tuple[Any, ...], how: dict[str, Any], environment: dict[str, str]
) -> None:
    triton: Any = importlib.import_module("triton.compiler.compiler")
    os.environ.update(environment)
    signature, constants, attrs = what
    source = kind(getattr(importlib.import_module(module), name), signature, None, attrs)
    source.constants = constants
    _make_launcher(triton.compile(source, **how))


def _compile_of_inductor(*args: Any) -> Any:
    from torch._inductor.runtime.compile_tasks import _worker_compile_triton

    kernel, microseconds = _worker_compile_triton(*args)
    for result in kernel.compile_results:
        _make_launcher(result.kernel)
    return kernel, microseconds


def _make_launcher(kernel: Any) -> None:
    """Have a C compiler make what launches a kernel, which takes as long as the kernel. It is found by its source."""
    if hasattr(kernel, "_init_handles"):  # Inductor has its own way to launch most of its kernels
        driver: Any = importlib.import_module("triton.runtime.driver")
        with contextlib.suppress(Exception):
            driver.driver.active.launcher_cls(kernel.src, kernel.metadata)


def _begin_copy(parent: int) -> None:
    """What a server does when it is to end is its own: a signal to the whole group ends a copy, and that is all."""
    from torch._inductor.compile_worker.utils import _async_compile_initializer

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _async_compile_initializer(parent)  # ignores Ctrl-C, and has torch know
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A copy holds what this process has open: the memory of a GPU would not be free before it is gone, too."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
