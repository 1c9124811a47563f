"""How fast a report of many kernels opens in a browser: made-up traces, in Chromium without a window.

"layers" is a language model that is replayed, with few rows of many launches; in "distinct" every launch is a row of
its own, the worst there can be. "open" is the time from the navigation to the first frame with table and timeline, the
median of several; the others are times until the next frame.

python benchmarks/report.py                    # 50,000 kernels
python benchmarks/report.py --kernels 200000
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cases.browser import Browser, browser, missing_browser
from tests.cases.reports import distinct_kernels, replays, trace_of

from piecegraph.provenance.launch import KernelProfile

LAYERS, KERNELS_A_LAYER = 32, 6
OPENED = """
const done = arguments[arguments.length - 1];
requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0));
"""
"""A frame later; the clock of a page begins with its navigation."""
UNTIL_DRAWN = """
const done = arguments[arguments.length - 1];
const start = performance.now();
{};
requestAnimationFrame(() => setTimeout(() => done(performance.now() - start), 0));
"""
ACTIONS = {
    "sort": "document.querySelector('[data-key=kernel] button').click()",
    "filter": "table.filterBy('layers.3 mm')",
    "scroll": "document.getElementById('rows').scrollTop = 1e6",
}


def profiles(number: int) -> dict[str, Callable[[], KernelProfile]]:
    num_replays = max(number // (LAYERS * KERNELS_A_LAYER + 1), 1)
    return {"layers": lambda: replays(num_replays, LAYERS), "distinct": lambda: distinct_kernels(number)}


def measure(page: Browser, path: Path, rounds: int) -> dict[str, float]:
    def answer(script: str) -> float:
        found: float = page.call("POST", "/execute/async", {"script": script, "args": []})
        return found

    opened = []
    for _ in range(rounds):
        page.open("about:blank")
        page.open(path.as_uri())
        opened.append(answer(OPENED))
    actions = {name: answer(UNTIL_DRAWN.format(script)) for name, script in ACTIONS.items()}
    assert page.problems() == []
    return {"open": statistics.median(opened), **actions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if reason := missing_browser():
        print(f"nothing to measure: {reason}")
        return
    print(f"{'trace':<10}{'kernels':>9}{'rows':>8}{'MB':>7}{'write s':>9}{'open ms':>9}", end="")
    print("".join(f"{name + ' ms':>11}" for name in ACTIONS))
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder) / "browser") as page:
        for name, make in profiles(arguments.kernels).items():
            trace = trace_of(make())
            start = time.perf_counter()
            path = trace.save(Path(folder) / "report.html")
            seconds = time.perf_counter() - start
            row = f"{name:<10}{len(trace.launches):>9,}{len(trace.table().rows):>8,}{path.stat().st_size / 1e6:>7.1f}"
            found = measure(page, path, arguments.rounds)
            print(f"{row}{seconds:>9.1f}{found.pop('open'):>9.0f}" + "".join(f"{ms:>11.0f}" for ms in found.values()))


if __name__ == "__main__":
    main()
