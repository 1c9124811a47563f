"""What kernels really cost: a replay is timed with them and without them."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from piecegraph.provenance.names import fold_layers
from piecegraph.provenance.selection.kernels import LiveKernel
from piecegraph.tape.tape import Rerun

_REPLAYS = 5
"""In one measurement. Before it, one more is not counted: the first replay after a switch uploads the graph again."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a replay with some kernels and without them."""

    phase: str
    title: str
    """The call and the module they come from; ``all of them`` for the whole selection."""
    num_kernels: int
    with_us: float
    """Median, as is the next."""
    without_us: float
    spread_us: float
    """Of one measurement: the larger of the two interquartile ranges."""

    @property
    def saved_us(self) -> float:
        return self.with_us - self.without_us

    def __str__(self) -> str:
        return (
            f"{self.phase}: {self.title} ({self.num_kernels} kernels): {self.saved_us:.1f} us of {self.with_us:.1f} us"
            f" (spread {self.spread_us:.1f} us)"
        )


def measure_costs(phase: str, kernels: Sequence[LiveKernel], rerun: Rerun, rounds: int) -> list[Cost]:
    """Time every group of kernels, and all of them together."""
    groups: dict[str, list[LiveKernel]] = {}
    for live in kernels:
        groups.setdefault(_title(live), []).append(live)
    if len(groups) > 1:
        groups["all of them"] = list(kernels)
    whole: list[float] = []
    without: dict[str, list[float]] = {title: [] for title in groups}
    for _ in range(rounds):  # all in turn, so that a change of clocks meets them alike
        whole.append(_microseconds(rerun.replay, rerun))
        for title, group in groups.items():
            with _left_out(group):
                without[title].append(_microseconds(rerun.replay, rerun))
    rerun.replay()  # leaves the outputs of a whole run behind
    return [
        Cost(
            phase,
            title,
            len(group),
            statistics.median(whole),
            statistics.median(without[title]),
            max(_spread(whole), _spread(without[title])),
        )
        for title, group in groups.items()
    ]


@contextlib.contextmanager
def _left_out(kernels: Sequence[LiveKernel]) -> Iterator[None]:
    running = [live for live in kernels if live.is_on]
    try:
        for live in running:
            live.switch(on=False)
        yield
    finally:
        for live in running:
            live.switch(on=True)


def _microseconds(replay: Callable[[], Any], rerun: Rerun) -> float:
    replay()
    return statistics.median(rerun.seconds_of(replay) for _ in range(_REPLAYS)) * 1e6


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4)
    return third - first


def _title(live: LiveKernel) -> str:
    call = live.call
    if call is None:
        return "unknown"
    module = fold_layers(call.origins[0].module) if call.origins else ""
    return f"{call.op} in {module}" if module else call.op
