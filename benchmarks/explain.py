"""How fast ``piecegraph explain`` reads: logs made on the spot, seconds, MB/s and peak memory.

python benchmarks/explain.py                 # 100 MB each
python benchmarks/explain.py --megabytes 1   # a second
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from piecegraph.explain.from_logs import explain_logs

CHUNKS = (
    "Traceback (most recent call last):\n",
    '  File "/srv/app/serve.py", line 41, in main\n    engine.step()\n    ^^^^^^^^^^^^^\n',
    '  File "/usr/lib/python3.12/site-packages/vllm/v1/engine/core.py", line 962, in step\n    self.execute(batch)\n',
    '  File "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1773, in _call\n    return f(*args)\n',
    '  File "/srv/app/model.py", line 118, in forward\n    return x @ self.weight\n           ~~^~~~~~~~~~~~~\n',
)


def ordinary(number: int) -> str:
    return (
        f"[2025-10-21 19:{number // 60 % 60:02}:{number % 60:02} TP{number % 8}] Decode. #running-req: {number % 97}, "
        f"#token: {number}, token usage: 0.{number % 100:02}, gen throughput (token/s): {number % 997}.22\n"
    )


def failure(number: int) -> list[str]:
    return [*CHUNKS, f"RuntimeError: mat1 and mat2 shapes cannot be multiplied ({number % 64}x128 and 96x64)\n"]


def mostly_ordinary() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield "".join(failure(number)) if number % 2000 == 0 else ordinary(number)


def all_tracebacks() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield "".join(failure(number))


def all_interleaved() -> Iterator[str]:
    """Eight processes at a time that fail alike, entry by entry in any order."""
    generator = random.Random(0)
    number = 0
    while True:
        number += 8
        waiting = [failure(number + rank) for rank in range(8)]
        while waiting:
            chosen = generator.choice(waiting)
            yield chosen.pop(0)
            waiting = [chunks for chunks in waiting if chunks]


LOGS: dict[str, Callable[[], Iterator[str]]] = {
    "ordinary lines, a traceback in 2000": mostly_ordinary,
    "tracebacks only": all_tracebacks,
    "interleaved tracebacks only": all_interleaved,
}


def write(path: Path, texts: Iterator[str], num_bytes: int) -> None:
    written = 0
    with path.open("w") as file:
        for text in texts:
            written += file.write(text)
            if written >= num_bytes:
                return


def measure(path: Path) -> None:
    """Explain one log in this process and print what it took."""
    start = time.perf_counter()
    page = explain_logs([path])
    seconds = time.perf_counter() - start
    megabytes = path.stat().st_size / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{megabytes:7.1f} {seconds:8.2f} {megabytes / seconds:7.1f} {peak:9.0f} {page.who.num_tracebacks:11,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    print(f"{'log':<38} {'MB':>7} {'seconds':>8} {'MB/s':>7} {'peak MiB':>9} {'tracebacks':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for name, make in LOGS.items():
            path = Path(folder) / "run.log"
            write(path, make(), int(options.megabytes * 1e6))
            print(f"{name:<38} ", end="", flush=True)
            subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)  # a peak of its own


if __name__ == "__main__":
    main()
