"""How many threads run a step on a CPU: the quickest number, and the process keeps its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import piecegraph
from piecegraph.errors import ConfigError
from piecegraph.llm.run import threads
from piecegraph.llm.run.threads import at_most_threads, choose_threads


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Machine:
    """Stands for torch and for the clock: a step takes as long as it is told to with a number of threads."""

    def __init__(self, num_threads: int, seconds: Callable[[int, int], float]) -> None:
        self.num_threads, self.now, self.tried = num_threads, 0.0, list[int]()
        self._seconds = seconds

    def get_num_threads(self) -> int:
        return self.num_threads

    def set_num_threads(self, count: int) -> None:
        self.num_threads = count

    def perf_counter(self) -> float:
        return self.now

    def step(self) -> None:
        self.tried.append(self.num_threads)
        self.now += self._seconds(self.num_threads, len(self.tried))


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], str]:
    def on(machine: Machine) -> str:
        monkeypatch.setattr(threads, "torch", machine)
        monkeypatch.setattr(threads, "time", machine)
        before = machine.num_threads
        decision = choose_threads("auto", machine.step)
        assert machine.num_threads == before
        assert f"torch is set to {before}" in decision.reason
        return decision.choice

    return on


def test_the_quickest_number_is_taken(choose: Callable[[Machine], str]) -> None:
    assert choose(Machine(8, lambda count, _: 0.01 / count)) == "8"
    assert choose(Machine(8, lambda count, _: 0.01 * count)) == "1"
    assert choose(Machine(8, lambda count, _: 0.01 + abs(count - 4))) == "4"
    assert choose(Machine(6, lambda count, _: 0.01 / count)) == "6"


def test_fewer_are_taken_if_they_are_as_quick(choose: Callable[[Machine], str]) -> None:
    assert choose(Machine(8, lambda count, _: 0.01 if count >= 4 else 0.02)) == "4"
    assert choose(Machine(2, lambda count, _: 0.0102 if count == 1 else 0.01)) == "1"


def test_one_slow_step_decides_nothing(choose: Callable[[Machine], str]) -> None:
    assert choose(Machine(2, lambda count, number: 0.01 / count + (number == 6))) == "2"


def test_slow_steps_are_tried_less_often(choose: Callable[[Machine], str]) -> None:
    quick, slow = Machine(2, lambda *_: 0.01), Machine(2, lambda *_: 5.0)
    choose(quick)
    choose(slow)
    assert (len(quick.tried), len(slow.tried)) == (12, 8)


def test_one_thread_and_a_wish_are_not_tried() -> None:
    def never() -> None:
        pytest.fail("nothing is tried")

    assert choose_threads(3, never).choice == "3"
    with at_most_threads(1):
        assert choose_threads("auto", never).choice == "1"


def test_the_process_keeps_its_number(two_threads: None) -> None:
    with at_most_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(KeyboardInterrupt), at_most_threads(1):
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 2
    for more in (None, 2, 4):  # what the user sets is the most
        with at_most_threads(more):
            assert torch.get_num_threads() == 2


def test_a_wish_is_a_positive_number(tmp_path: Path) -> None:
    for wrong in (0, "two", 1.5):
        with pytest.raises(ConfigError, match=r"PG101 options\['num_threads'\] is"):
            piecegraph.LLM(tmp_path, options={"num_threads": wrong})
