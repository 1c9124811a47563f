"""Inductor's worker processes."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch._inductor.config
from torch._inductor.async_compile import AsyncCompile

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
