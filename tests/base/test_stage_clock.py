"""Seconds of stages."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import piecegraph
from piecegraph.base.progress import StageClock


def test_stages_that_come_again_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = StageClock()
    clock.lap("trace")
    clock.lap("split")
    clock.start()
    clock.lap("split")
    assert clock.seconds == {"trace": 1.0, "split": 6.0}


def test_what_passed_between_two_plans_of_a_trace_is_no_stage() -> None:
    fast = piecegraph.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval(), backend="eager")
    x = torch.ones(2, 4)
    with torch.no_grad():
        fast(x)
        time.sleep(0.5)
        with piecegraph.intercept(F.relu, after=lambda *_, **__: None):
            fast(x)
            seconds = fast.stats()["plans"][0]["seconds"]
    assert 0 < seconds["split"] < 0.4
