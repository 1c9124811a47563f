"""How far it is from a call to the tape: the functions of Python that a replay and a step pass through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import piecegraph
from tests.cases.llm_shelf import shelf

PACKAGE = str(Path(piecegraph.__file__).parent)
SIMULATED = {"graph_device": "simulated"}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) + y


def walk(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """The functions of Python that are entered, in order, with their files."""
    seen: list[tuple[str, str]] = []

    def enter(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            seen.append((frame.f_code.co_qualname, frame.f_code.co_filename))

    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def up_to_the_graph(seen: list[tuple[str, str]]) -> list[str]:
    names = [name for name, _ in seen]
    return names[: names.index("SimulatedGraphs.end.<locals>.replay") + 1]


@pytest.mark.parametrize(("frontend", "limit"), [("trace", 15), ("breakable", 18)])
def test_a_replay_is_a_few_functions_from_its_graph(frontend: str, limit: int) -> None:
    fast = piecegraph.compile(
        Layer().eval(), backend="eager", frontend=frontend, dynamic_dims={"x": 0, "y": 0}, options=SIMULATED
    )
    x, y = torch.ones(4, 8), torch.ones(4, 8)
    with torch.inference_mode():
        fast(x, y=y)
        fast(x, y=y)
        _, *passed = up_to_the_graph(walk(lambda: fast(x, y=y)))
    assert len(passed) <= limit, passed  # breakable looks at values that replays do not see
    assert passed[-2:] == ["_replay_of.<locals>.replay", "SimulatedGraphs.end.<locals>.replay"]


def test_a_decode_step_is_schedule_fill_run_commit(tmp_path: Path) -> None:
    with shelf(tmp_path) as models:
        llm = models.load("llama", capture_sizes=[1, 8], max_num_seqs=1, options=SIMULATED)
        engine = llm.started.engine
        with torch.inference_mode():
            engine.add([5, 6, 7], piecegraph.llm.SamplingParams(max_new_tokens=8, ignore_eos=True), seed=0)
            for _ in range(3):
                engine.step()
            seen = walk(engine.step)
    ours = [(name, file) for name, file in seen if file.startswith(PACKAGE) and "simulated" not in file]
    names = [name for name, _ in ours]
    order = ["Scheduler.schedule", "Forward.fill", "Forward.run_step", "Scheduler.commit"]
    assert [name for name in names if name in order] == order
    before_tape = names[: names.index("_replay_of.<locals>.replay")]
    assert len(before_tape) <= 66, before_tape
    # A reader stops at torch_compat once, whatever file of it a name is in.
    assert len({file.partition("/torch_compat/")[0] for _, file in ours}) <= 26
