"""Do two halves of a batch, side by side on two streams, take less time than the whole batch?

With several GPUs, one half could compute while what the other made is added up over ranks. With one GPU there is
nothing to wait for; so a chain of tiny kernels behind attention and MLP stands for a sum, which takes about as long and
leaves the GPU as idle. A step is a body of Llama's shape over a cache of CONTEXT tokens for each row, compiled by
Inductor and captured: the whole batch as one graph, and its halves as two, replayed one behind the other and on two
streams.

    python benchmarks/overlap.py

Results are compared first. Medians of REPEATS replays behind WARM_UPS that are not counted, with p10 and p90.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from piecegraph.base import torch_compat
from piecegraph.bench.result import quantile

CONTEXT, WARM_UPS, REPEATS = 256, 5, 30


class Shape(NamedTuple):
    width: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


SHAPES = {
    "llama-1b": Shape(2048, 8192, 16, 32, 8),
    "llama-8b": Shape(4096, 14336, 32, 32, 8),
    "tiny": Shape(64, 128, 2, 4, 2),
}


class Layer(NamedTuple):
    """The weights of one layer."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


def attend(x: Tensor, layer: Layer, keys: Tensor, values: Tensor) -> Tensor:
    """One new token of each row against what is cached of it. Heads that share keys are the rows of one product."""
    num_rows, num_kv_heads, _, head_dim = keys.shape
    projected = functional.linear(functional.rms_norm(x, x.shape[-1:]), layer.qkv)
    queries = projected[:, : x.shape[-1]].view(num_rows, num_kv_heads, -1, head_dim)
    found = functional.scaled_dot_product_attention(queries, keys, values)
    return x + functional.linear(found.reshape(num_rows, -1), layer.out)


def mlp(x: Tensor, layer: Layer) -> Tensor:
    gate, up = functional.linear(functional.rms_norm(x, x.shape[-1:]), layer.gate_up).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, layer.down)


@dataclass(frozen=True)
class Body:
    """A model of some shape, with a cache for so many rows."""

    layers: Sequence[Layer]
    keys: Tensor
    values: Tensor
    attend: Callable[..., Tensor]
    mlp: Callable[..., Tensor]

    @staticmethod
    def make(shape: Shape, most_rows: int, device: torch.device) -> Body:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def weight(*size: int) -> Tensor:
            return torch.randn(size, device=device, dtype=dtype) * size[-1] ** -0.5

        kv_width = shape.num_kv_heads * shape.head_dim
        layers = [
            Layer(
                weight(shape.width + 2 * kv_width, shape.width),
                weight(shape.width, shape.width),
                weight(2 * shape.inner, shape.width),
                weight(shape.width, shape.inner),
            )
            for _ in range(shape.num_layers)
        ]
        cache = (most_rows, shape.num_kv_heads, CONTEXT, shape.head_dim)
        functions: tuple[Any, Any] = (attend, mlp)
        if device.type == "cuda":
            functions = tuple(torch.compile(each, dynamic=False, fullgraph=True) for each in functions)
        return Body(layers, weight(*cache), weight(*cache), *functions)

    def run(self, x: Tensor, rows: slice, flag: Tensor, sum_kernels: int) -> Tensor:
        """A step of some rows, with so many tiny kernels in the place of each sum."""
        for layer in self.layers:
            x = self.attend(x, layer, self.keys[rows], self.values[rows])
            _stand_in(flag, sum_kernels)
            x = self.mlp(x, layer)
            _stand_in(flag, sum_kernels)
        return x


def _stand_in(flag: Tensor, num_kernels: int) -> None:
    for _ in range(num_kernels):
        flag.add_(1)


class Tape:
    """A function as a graph; on a CPU, where there is no stream, it is called.

    It is captured on a stream of its own: cuBLAS has a workspace for each, which two graphs that run side by side must
    not share.
    """

    def __init__(self, run: Callable[[], Any], stream: Any) -> None:
        self.result = run()  # compiles
        self.replay: Callable[[], Any] = run
        self.stream = stream
        if stream is not None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.result = run()
            self.replay = graph.replay


def side_by_side(tapes: Sequence[Tape]) -> None:
    """Replay each on its own stream; what comes next waits for all."""
    for tape in tapes:
        if tape.stream is not None:
            tape.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(tape.stream):  # None: nothing changes
            tape.replay()
    for tape in tapes:
        if tape.stream is not None:
            torch.cuda.current_stream().wait_stream(tape.stream)


def timed_ms(run: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float, float]:
    """Median, p10 and p90, from the first kernel to the last; on a CPU, of the call."""
    times = []
    for _ in range(WARM_UPS + repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
    times = times[WARM_UPS:]
    return quantile(times, 0.5), quantile(times, 0.1), quantile(times, 0.9)


def measure(body: Body, num_rows: int, sum_kernels: int, device: torch.device, repeats: int) -> list[str]:
    """One row of the table."""
    width = body.layers[0].out.shape[0]
    x = torch.randn(num_rows, width, device=device, dtype=body.keys.dtype)
    flags = torch.zeros(4, 64, device=device)
    halves = [slice(0, num_rows // 2), slice(num_rows // 2, num_rows)]
    streams = [torch.cuda.Stream() if device.type == "cuda" else None for _ in flags]
    whole = Tape(lambda: body.run(x, slice(0, num_rows), flags[0], sum_kernels), streams[0])
    parts = [
        Tape(lambda rows=rows, flag=flag: body.run(x[rows], rows, flag, sum_kernels), stream)  # type: ignore[misc]
        for rows, flag, stream in zip(halves, flags[1:], streams[1:], strict=False)
    ]
    whole.replay()
    side_by_side(parts)
    if device.type == "cuda":
        torch.cuda.synchronize()
    found, expected = torch.cat([part.result for part in parts]).float(), whole.result.float()
    difference = float((found - expected).norm() / expected.norm())  # of bfloat16, which grows with the layers
    assert difference < 0.01 * len(body.layers) ** 0.5, f"the halves do not give what the whole gives: {difference}"
    one_sum = Tape(lambda: _stand_in(flags[3], sum_kernels or 1), streams[3])
    ways = {
        "one tape": whole.replay,
        "one stream": lambda: [part.replay() for part in parts],
        "two streams": lambda: side_by_side(parts),
        "a sum": one_sum.replay,
    }
    times = {name: timed_ms(run, device, repeats) for name, run in ways.items()}
    sum_ms, _, _ = times.pop("a sum")
    sum_us = f"{sum_ms * 1e3:.0f}" if sum_kernels else "none"
    cells = [f"{median:.3f} ({low:.3f} to {high:.3f})" for median, low, high in times.values()]
    return [str(num_rows), sum_us, *cells, f"{times['two streams'][0] / times['one tape'][0]:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama-1b,llama-8b", help="comma list")
    parser.add_argument("--tokens", default="64,128,256,512,1024,2048", help="comma list of batch sizes")
    parser.add_argument("--sum-kernels", default="0,4,16", help="tiny kernels that stand for a sum over ranks")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script on a CPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = ["tiny"] if options.tiny else options.shapes.split(",")
    tokens = [4] if options.tiny else [int(number) for number in options.tokens.split(",")]
    repeats = 2 if options.tiny else options.repeats
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, where nothing runs side by side"
    print(f"{where}, torch {torch.__version__}; ms, median of {repeats} (p10 to p90)\n")
    print("| shape | tokens | a sum, us | one tape | two tapes, one stream | two tapes, two streams | x one tape |")
    print("|---|---|---|---|---|---|---|")
    torch.manual_seed(0)
    for name in shapes:
        torch.compiler.reset()  # what was compiled for another shape counts against the sizes of this one
        with torch.inference_mode(), torch_compat.no_silent_eager():
            body = Body.make(SHAPES[name], max(tokens), device)
            for num_rows in tokens:
                for kernels in map(int, options.sum_kernels.split(",")):
                    row = measure(body, num_rows, kernels, device, repeats)
                    print(f"| {' | '.join([name, *row])} |", flush=True)
            del body


if __name__ == "__main__":
    main()
