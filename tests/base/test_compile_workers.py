"""What compiles gets ready while something else runs: Inductor's worker processes, Triton's hash of itself."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime import triton_compat

from piecegraph.base import torch_compat


def test_workers_are_up_before_the_first_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a first job is done, torch compiles kernels in its own process, one after the other."""
    submitted: list[Any] = []

    class Pool:
        def submit(self, job: Any) -> Future[Any]:
            submitted.append(job)
            return Future()

    monkeypatch.setattr(AsyncCompile, "process_pool", Pool)
    monkeypatch.setattr(AsyncCompile, "_ready_future", None)
    with torch._inductor.config.patch(compile_threads=2):  # type: ignore[attr-defined]
        torch_compat.start_compile_workers()
    assert len(submitted) == 1


def test_only_what_needs_the_hash_of_triton_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, is_hashed = threading.Event(), threading.Event()

    def triton_key() -> None:
        assert goes_on.wait(10)
        is_hashed.set()

    monkeypatch.setattr(triton_compat, "HAS_TRITON", True)
    monkeypatch.setattr(triton_compat, "triton_key", triton_key)
    torch_compat.hash_triton.cache_clear()
    torch_compat.hash_triton()
    threading.Timer(0.1, goes_on.set).start()
    assert not is_hashed.is_set()
    with contextlib.suppress(Exception):  # torch has none of this name
        torch_compat.load_compiled("no such artifact")
    assert is_hashed.is_set()
    torch_compat.hash_triton.cache_clear()
