"""What is told of the machine."""

from __future__ import annotations

import ctypes.util
import subprocess
from pathlib import Path

import pytest
import torch

from piecegraph.base.environment import describe_environment, driver_version


def test_of_this_machine() -> None:
    found = describe_environment()
    assert found["torch"] == str(torch.__version__)
    assert found["transformers"][0].isdigit()
    if not torch.cuda.is_available():
        assert found["cuda driver"] == "none"


def test_without_a_driver_the_version_is_unknown(tmp_path: Path) -> None:
    assert driver_version(str(tmp_path / "libcuda.so.1")) == "unknown"
    assert driver_version(ctypes.util.find_library("c") or "libc.so.6") == "unknown", "a library without the function"


def test_a_driver_says_its_version(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 13020; return 0; }\n")
    try:
        subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler")
    assert driver_version(str(library)) == "13.2"


@pytest.mark.gpu
def test_of_a_machine_with_a_gpu() -> None:
    found = describe_environment()
    assert float(found["cuda driver"]) >= 12
    assert ", sm_" in found["gpu 0"]
