"""What a replay costs the host: microseconds from the call to the last launch, for a tape of graphs and ops.

The device is idle before every call and does next to nothing, so what is timed is Python, launches and copies.

    python benchmarks/replay.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.bench.result import quantile

CUTS = 16
ROWS, WIDTH = 8, 64


@torch.library.custom_op("pgbench::look", mutates_args=("x",))
def look(x: Tensor) -> None:
    """An op between two graphs that does nothing, so that nothing but the way to it is timed."""


@look.register_fake
def _(x: Tensor) -> None:
    return None


class Cut(nn.Module):
    """As many linear layers as there are cuts, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(CUTS + 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
            look(x)
        result: Tensor = self.layers[-1](x)
        return result


def host_us(run: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Median, p10 and p90 of the time until a function returns, with nothing left to do on the device before it."""
    is_gpu = torch.cuda.is_available()
    times = []
    for number in range(repeats + repeats // 4):
        if is_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if number >= repeats // 4:
            times.append((time.perf_counter() - start) * 1e6)
    return quantile(times, 0.5), quantile(times, 0.1), quantile(times, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device(device):
        model = Cut().eval().requires_grad_(False)
        x = torch.randn(ROWS, WIDTH)
    fast = piecegraph.compile(
        model, backend="eager", splitting_ops=["pgbench::look"], dynamic_dims={"x": 0}, capture_sizes=[ROWS]
    )
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-2)
        figures = {"eager": host_us(lambda: model(x), options.repeats // 10)}
        figures["piecegraph"] = host_us(lambda: fast(x), options.repeats)
    sizes = fast.stats()["plans"][0]["sizes"][str(ROWS)]
    num_steps = sizes["graphs"] + sizes["eager_steps"]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, where pieces are called directly"
    print(f"{where}, torch {torch.__version__}; a tape of {num_steps} steps, {options.repeats} replays")
    for name, (median, low, high) in figures.items():
        print(f"{name:<12} {median:8.1f} us from the call to the last launch (p10 {low:.1f}, p90 {high:.1f})")


if __name__ == "__main__":
    main()
