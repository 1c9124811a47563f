"""Starts in new processes, which share a cache that was empty before: the first is cold, the others are warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from piecegraph.bench.show import aligned

STARTED_BY = "PIECEGRAPH_BENCH_START"
"""Set in the environment of a process that is to start, tell how, and end."""


@dataclass(frozen=True)
class Start:
    """What a process told of its start."""

    wall: float
    """Seconds of the call, importing what it needs included."""
    stages: dict[str, float]
    cache: str
    """What the plan's cache had to do with it."""
    weights: dict[str, float] | None = None
    """How weights came from their files, where there are files."""
    first_token: float | None = None
    """Seconds from there to the first token of a request."""


def tell_start(start: Start) -> None:
    """What the process of a start prints for :func:`run_start`."""
    print(f"{STARTED_BY} {json.dumps(asdict(start))}")


def run_start(arguments: Sequence[str], cache: str) -> Start:
    """Start in a new process, with a folder for plans and one for what compilers keep elsewhere."""
    places = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}-inductor", "TRITON_HOME": f"{cache}-triton"}
    told = {**os.environ, **places, "PIECEGRAPH_CACHE": cache, STARTED_BY: "1"}
    done = subprocess.run([sys.executable, *arguments], env=told, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(STARTED_BY))
    return Start(**json.loads(line.removeprefix(STARTED_BY)))


def start_twice(arguments: Sequence[str]) -> dict[str, Start]:
    """A cold start, two warm ones, and a table of their stages."""
    with tempfile.TemporaryDirectory() as folder:
        starts = {"cold": run_start(arguments, f"{folder}/cache")}
        show(starts)
        for name in ("warm", "warm again"):
            starts[name] = run_start(arguments, f"{folder}/cache")
    show(starts)
    return starts


def show(starts: dict[str, Start]) -> None:
    stages = list(dict.fromkeys(stage for start in starts.values() for stage in start.stages))
    rows = [["seconds", *stages, "sum", "without import", "wall", "to a token"]]
    for name, start in starts.items():
        total = sum(start.stages.values())
        rest = total - start.stages.get("import", 0.0)
        token = "-" if start.first_token is None else f"{start.first_token:.3f}"
        cells = [f"{start.stages.get(stage, 0.0):.2f}" for stage in stages]
        rows.append([name, *cells, f"{total:.2f}", f"{rest:.2f}", f"{start.wall:.2f}", token])
    print(aligned(rows), flush=True)
    for name, start in starts.items():
        print(f"  {name}: {start.cache}" + (f"; weights: {start.weights}" if start.weights else ""), flush=True)
