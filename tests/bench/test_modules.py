"""Any module by its factory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from piecegraph.base.progress import Progress
from piecegraph.bench import modules
from piecegraph.bench.config import resolve
from piecegraph.bench.result import BenchResult
from piecegraph.bench.run import run
from piecegraph.errors import ConfigError

Factory = Callable[[], Any]


class Noisy(torch.nn.Module):
    """Another answer at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) + torch.rand(1)
        return result


def linear() -> Any:
    return torch.nn.Linear(16, 16), lambda batch_size, input_len: {"input": torch.randn(batch_size, input_len, 16)}


def noisy() -> Any:
    return Noisy(), lambda batch_size, input_len: {"x": torch.randn(batch_size, 16)}


def measured(name: str, *modes: str) -> BenchResult:
    model = f"tests.bench.test_modules:{name}"
    sizes: dict[str, Any] = {"batch_sizes": (2, 3), "input_lens": (4,), "output_len": 2, "repeats": 2, "device": "cpu"}
    config, decisions = resolve(model, is_module=True, modes=modes, **sizes)
    return run(config, decisions, Progress(False))


def test_calls_of_a_module_are_measured() -> None:
    result = measured("linear", "eager", "breakable", "full")
    assert [(row.batch_size, row.phase, row.mode, row.verdict.state) for row in result.rows] == [
        (batch, "forward", mode, state)
        for batch in (2, 3)
        for mode, state in (("eager", "reference"), ("breakable", "same"), ("full", "not available"))
    ]
    ours = result.rows[1]
    assert ours.timing is not None
    assert ours.tokens_s == pytest.approx(2 / ours.timing.median_ms * 1e3)
    assert ours.coverage == 0.0, "there are no graphs"
    assert "output length" not in {each.subject for each in result.config}
    stages = {each.mode: each.stages_s for each in result.startup}
    assert stages["breakable"].keys() > {"load", "record"}


def test_a_module_that_answers_otherwise_has_no_number() -> None:
    result = measured("noisy", "eager", "breakable")
    assert [row.verdict.state for row in result.rows] == ["reference", "differs"] * 2
    assert "relative difference" in result.rows[1].verdict.reason


@pytest.mark.parametrize(
    ("name", "why"),
    [("no.such:factory", "No module named"), ("os:no_such", "has no attribute"), ("os:getcwd", "returned a str")],
)
def test_what_is_no_factory_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        modules._make(name)
