"""Triton kernels that are compiled aside and not launched: for a GPU that is not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.base import torch_compat

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

CPU = torch.device("cpu")


@triton.jit
def fill_kernel(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.store(x + tl.arange(0, BLOCK), 1.0)


@triton.jit
def broken_kernel(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    tl.static_assert(BLOCK > 1000, "it is too small")


class MadeUpDriver:
    """An H200 that runs nothing."""

    def __init__(self) -> None:
        self.utils = self
        self.loaded: list[str] = []
        self.num_launches = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**16}

    def load_binary(self, name: str, *binary: Any) -> tuple[int, ...]:
        self.loaded.append(name)
        return 1, 1, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*args: Any) -> None:
            self.num_launches += 1

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MadeUpDriver]:
    driver = MadeUpDriver()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield driver
    for kernel in (fill_kernel, broken_kernel):
        kernel.device_caches.clear()


@pytest.fixture(params=["threads", "copies"])
def compilers(request: pytest.FixtureRequest, driver: MadeUpDriver) -> Iterator[torch_compat.Compilers | None]:
    """What compiles: copies of this process, which have the made-up driver, too."""
    if request.param == "threads":
        yield None
        return
    copies = torch_compat.Compilers()
    yield copies
    copies.close()


def test_each_kernel_is_compiled_and_loaded_once_and_none_is_launched(
    driver: MadeUpDriver, compilers: torch_compat.Compilers | None
) -> None:
    x = torch.zeros(64)
    run = triton.JITFunction.run
    with torch_compat.compiled_aside(CPU, compilers):
        for block in (16, 32, 16, 64):
            fill_kernel[(1,)](x, BLOCK=block)
    assert triton.JITFunction.run is run
    assert (driver.loaded, driver.num_launches) == (["fill_kernel"] * 3, 0)
    fill_kernel[(1,)](x, BLOCK=32)
    assert (len(driver.loaded), driver.num_launches) == (3, 1), "it was there"


def test_one_that_cannot_be_compiled_is_told_and_the_others_are(
    driver: MadeUpDriver, compilers: torch_compat.Compilers | None
) -> None:
    x = torch.zeros(64)

    def launch_both() -> None:
        with torch_compat.compiled_aside(CPU, compilers):
            broken_kernel[(1,)](x, BLOCK=16)
            fill_kernel[(1,)](x, BLOCK=16)

    with pytest.raises(triton.CompilationError, match="it is too small"):
        launch_both()
    fill_kernel[(1,)](x, BLOCK=16)
    assert (len(driver.loaded), driver.num_launches) == (1, 1)


def test_other_threads_launch_as_ever(driver: MadeUpDriver, compilers: torch_compat.Compilers | None) -> None:
    x = torch.zeros(64)
    with torch_compat.compiled_aside(CPU, compilers):
        other = threading.Thread(target=lambda: fill_kernel[(1,)](x, BLOCK=16))
        other.start()
        other.join()
        assert driver.num_launches == 1
