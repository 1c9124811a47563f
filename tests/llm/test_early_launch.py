"""Which steps launch kernels before those in front of them have ended."""

from __future__ import annotations

import pytest
import torch

from piecegraph.base import torch_compat
from piecegraph.llm.kernels import early_launch

DEVICE = torch.device("cuda", 0)


def launcher() -> object:
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    made = driver.CudaLauncher.__new__(driver.CudaLauncher)
    made.launch_pdl = True
    return made


def is_early(made: object) -> bool:
    return bool(made.launch_pdl)  # type: ignore[attr-defined]


def test_what_is_launched_late_is_so_inside_alone() -> None:
    before = launcher()
    with torch_compat.late_launches():
        inside = launcher()
        assert not is_early(before)
        assert not is_early(inside)
    assert is_early(before)
    assert is_early(inside)


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, True), (256, True), (257, False), (None, False)])
def test_small_steps_launch_early(num_tokens: int | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_launch, "launches_early", lambda device: True)
    made = launcher()
    with early_launch.launches_of(DEVICE, num_tokens):
        assert is_early(made) == expected


def test_nothing_is_launched_early_on_a_cpu() -> None:
    assert not early_launch.launches_early(torch.device("cpu"))
    assert early_launch.early_launches(torch.device("cpu")) == []
    assert early_launch.inductor_settings(torch.device("cpu")) == {}
