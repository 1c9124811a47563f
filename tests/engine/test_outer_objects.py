"""Objects outside of the call that change without being replaced, or are replaced by others that look alike."""

from __future__ import annotations

import collections
import configparser
import ctypes
import io
import logging
import re
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import piecegraph

SETTINGS: dict[str, Any] = {"backend": "eager", "options": {"graph_device": "simulated", "cache": False}}


class Kept(NamedTuple):
    make: Callable[[], Any]
    change: Callable[[Any], Any]
    use: Callable[[Any, Tensor], Tensor]


def _settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read_string("[model]\nscale = 2")
    return parser


def _tensor() -> Tensor:
    tensor = torch.ones(1)
    tensor.scale = 2.0  # type: ignore[attr-defined]
    return tensor


KEPT = {
    "chain": Kept(
        lambda: collections.ChainMap({}, {"scale": 2.0}),
        lambda kept: kept.maps[0].update(scale=5.0),
        lambda kept, x: x * kept["scale"],
    ),
    "UserDict": Kept(
        lambda: collections.UserDict(scale=2.0), lambda kept: kept.update(scale=5.0), lambda kept, x: x * kept["scale"]
    ),
    "settings": Kept(
        _settings, lambda kept: kept.set("model", "scale", "5"), lambda kept, x: x * float(kept["model"]["scale"])
    ),
    "memory": Kept(
        lambda: memoryview(bytearray(b"\2")), lambda kept: kept.__setitem__(0, 5), lambda kept, x: x * kept[0]
    ),
    "of C": Kept(
        lambda: ctypes.c_double(2), lambda kept: setattr(kept, "value", 5), lambda kept, x: x * float(kept.value)
    ),
    "text": Kept(
        lambda: io.StringIO("2"), lambda kept: (kept.seek(0), kept.write("5")), lambda kept, x: x * int(kept.getvalue())
    ),
    "lock": Kept(threading.Lock, lambda kept: kept.acquire(), lambda kept, x: x * (5 if kept.locked() else 2)),
    "event": Kept(threading.Event, lambda kept: kept.set(), lambda kept, x: x * (5 if kept.is_set() else 2)),
    "tensor": Kept(_tensor, lambda kept: setattr(kept, "scale", 5.0), lambda kept, x: x * kept * kept.scale),
    "pattern": Kept(
        lambda: [re.compile("ab")],
        lambda kept: kept.__setitem__(0, re.compile("abcde")),
        lambda kept, x: x * len(kept[0].pattern),
    ),
    "deep": Kept(
        lambda: {"a": [{"b": (types.SimpleNamespace(scale=2.0),)}]},
        lambda kept: setattr(kept["a"][0]["b"][0], "scale", 5.0),
        lambda kept, x: x * kept["a"][0]["b"][0].scale,
    ),
    "logger": Kept(
        lambda: logging.Logger("piecegraph.tests", level=2),
        lambda kept: kept.setLevel(5),
        lambda kept, x: x * kept.level,
    ),
}


class Holder(nn.Module):
    def __init__(self, kept: Any, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.kept = kept
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.kept, x)


@pytest.mark.parametrize("frontend", ["auto", "breakable"])
@pytest.mark.parametrize("is_attribute", [True, False])
@pytest.mark.parametrize("name", KEPT)
def test_a_change_is_noticed(name: str, is_attribute: bool, frontend: str) -> None:
    make, change, use = KEPT[name]
    kept = make()
    function = Holder(kept, use) if is_attribute else lambda x: use(kept, x)
    fast = piecegraph.compile(function, frontend=frontend, **SETTINGS)
    with torch.no_grad():
        for _ in range(3):
            assert fast(torch.ones(3)).tolist() == [2.0] * 3
        change(kept)
        for _ in range(3):
            assert fast(torch.ones(3)).tolist() == [5.0] * 3
    assert fast.stats()["replayed"] >= 5


def test_loggers_do_not_take_the_place_of_others() -> None:
    logger, scales = logging.getLogger("piecegraph.tests.model"), {"scale": 2.0}

    def function(x: Tensor) -> Tensor:
        logger.debug("%s rows", x.shape[0])
        return x * scales["scale"]

    fast = piecegraph.compile(function, frontend="breakable", **SETTINGS)
    with torch.no_grad():
        fast(torch.ones(3))
    names = fast._engine._kinds[0].outside.names
    assert len(names) < 50, names
