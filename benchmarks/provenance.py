"""What it costs to know which line launched each kernel: recording with and without provenance, and replays.

The Llama body of ``prefill.py``, recorded for a dozen sizes; what it takes to compile does not count. Replays are timed
three times, in turn; the smallest of the three medians counts. Then a trace is taken and it is counted how much of the
time of the replays is attributed. Run it on a GPU:

    python benchmarks/provenance.py
    python benchmarks/provenance.py --tiny             # a few seconds, also on a CPU, with simulated graphs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import piecegraph
from piecegraph.bench.machine import hardware
from piecegraph.bench.result import Timing
from results import Contender, table

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.prefill import Bench, attention, body, requests

SIZES = [16, 256, 1024]
LADDER = [1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 16]


def build(bench: Bench, ladder: list[int], backend: str, options: dict[str, Any]) -> tuple[Any, float]:
    """A compiled body with all sizes recorded, and the seconds that recording took."""

    def prepare(sizes: dict[str, int]) -> None:
        requests[:] = list(sizes.values())

    fast = piecegraph.compile(
        lambda input_ids, position_ids: body(bench.model, input_ids, position_ids),
        backend=backend,
        splitting_ops=[attention],
        capture_sizes=ladder,
        padding="always",
        dynamic_dims={"input_ids": 1, "position_ids": 1},
        options={"prepare": prepare, **options},
    )
    fast.capture(*bench.inputs(max(bench.sizes)))
    return fast, sum(size["seconds"] for size in fast.stats()["plans"][0]["sizes"].values())


def contend(bench: Bench, ladder: list[int], backend: str, options: dict[str, Any], num_rounds: int) -> list[Contender]:
    ways = {f"{backend}": False, f"{backend}, provenance": True}
    build(bench, ladder, backend, options)[0].close()  # libraries plan for new shapes, whoever comes first
    seconds: dict[str, float] = {}
    compiled: dict[str, Any] = {}
    for name, provenance in ways.items():
        compiled[name], seconds[name] = build(bench, ladder, backend, {**options, "provenance": provenance})
    rounds: dict[str, list[Contender]] = {name: [] for name in ways}
    for _ in range(num_rounds):  # in turn, so that a change of clocks meets both alike
        for name, fast in compiled.items():
            rounds[name].append(bench.contend(name, lambda n, fast=fast: fast(*bench.inputs(n)), notes={}))
    contenders = []
    for name, timed in rounds.items():
        notes = {"record s": f"{seconds[name]:.2f}", "ratio": f"{seconds[name] / seconds[backend]:.2f}"}
        timings = {size: min((one.timings[size] for one in timed), key=_median) for size in timed[0].timings}
        contenders.append(Contender(name, timings, notes))
    contenders[-1].notes.update(attributed(bench, compiled[f"{backend}, provenance"]))
    return contenders


def _median(timing: Timing) -> float:
    return timing.median_ms


def attributed(bench: Bench, fast: Any) -> dict[str, str]:
    """How many of the kernels of replays, and how much of their time, have a module and a line."""
    with piecegraph.trace() as trace:
        for n in bench.sizes:
            fast(*bench.inputs(n))
    replayed = [launch for launch in trace.launches if launch.how in ("node id", "position", "step")]
    if not replayed:
        return {}
    known = [
        launch
        for launch in replayed
        if launch.call is not None and launch.call.origins and launch.call.origins[0].module
    ]
    share = sum(launch.duration for launch in known) / sum(launch.duration for launch in replayed)
    return {
        "kernels": f"{len(replayed):,}",
        "attributed": f"{len(known) / len(replayed):.2%}",
        "of time": f"{share:.2%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--backends", default="eager,inductor", help="comma list of eager, inductor")
    parser.add_argument("--rounds", type=int, default=3, help="how often replays are timed (3)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    simulated = {} if device.type == "cuda" else {"graph_device": "simulated"}
    sizes, ladder = ([4, 8], [8, 4]) if options.tiny else (SIZES, LADDER)
    contenders: list[Contender] = []
    with torch.inference_mode():
        bench = Bench(device, sizes, ladder, tiny=options.tiny)
        for backend in options.backends.split(","):
            contenders += contend(bench, ladder, backend, simulated, options.rounds)
    what = f"the least of {options.rounds} medians of {bench.effort.repeats} replays; {len(ladder)} sizes recorded"
    print(f"{hardware()}; {what}\n{table(contenders)}")


if __name__ == "__main__":
    main()
