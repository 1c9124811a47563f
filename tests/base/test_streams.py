"""Streams that are entered at every step, on devices that are not there."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch

from piecegraph.base import torch_compat

Name = tuple[int, int, int]


class Driver:
    """What torch knows of streams: the current device, and the current stream of each."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Name] = {0: (10, 0, 1), 1: (20, 1, 1)}

    def get_device(self) -> int:
        return self.device

    def get(self, device_index: int) -> Name:
        return self.streams[device_index]

    def set(self, *, stream_id: int, device_index: int, device_type: int) -> None:
        self.device = device_index
        self.streams[device_index] = (stream_id, device_index, device_type)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", driver.get_device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", driver.get, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setStream", driver.set, raising=False)
    return driver


@pytest.mark.parametrize("device", [0, 1])
def test_behind_a_stream_all_is_as_it_was(driver: Driver, device: int) -> None:
    own: Any = types.SimpleNamespace(stream_id=30, device_index=device, device_type=1)
    on_stream = torch_compat.OnStream(own)
    for _ in range(2):
        with contextlib.suppress(KeyError), on_stream:
            assert (driver.device, driver.streams[device]) == (device, (30, device, 1))
            raise KeyError
        assert (driver.device, driver.streams) == (0, {0: (10, 0, 1), 1: (20, 1, 1)})


def test_a_stream_is_one_object(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", types.SimpleNamespace)
    first = torch_compat.current_stream(0)
    assert vars(first) == {"stream_id": 10, "device_index": 0, "device_type": 1}
    assert torch_compat.current_stream(0) is first
    assert torch_compat.current_stream(1) is not first
    torch_compat.cuda._named_stream.cache_clear()  # nobody is to be given these
