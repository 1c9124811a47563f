"""The layers of a decode step alone, on a GPU: all of them in one CUDA graph, as they follow each other in a model.

Kernels that begin early overlap with those around them (Note [Early launches]), so a tile that is best alone need not
be the best in a layer. The table shows the microseconds of a layer. With ``--tune`` other tiles are tried in all layers
at once, those of one kernel after those of the other, and the best is kept; results are compared before they are timed.

    python benchmarks/layers.py
    python benchmarks/layers.py --shape llama-8b --rows 8 --tune
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from piecegraph.base.compare import relative_error
from piecegraph.bench.machine import hardware
from piecegraph.bench.shapes import shape_config
from piecegraph.bench.timing import Effort, measure
from piecegraph.llm.kernels import skinny
from piecegraph.llm.kernels.attention import triton_paged
from piecegraph.llm.kernels.attention.triton_tiles import Tiles
from piecegraph.llm.kernels.skinny import Heads, Linear, Tile
from piecegraph.llm.specs import AttentionBatch, AttentionLayer

SHAPES = ("qwen3-0.6b", "llama-8b")
ROWS = (1, 8, 64)
MAX_ERROR = 0.1  # bfloat16 after all layers, sums in another order
EPS = 1e-6
DTYPE = torch.bfloat16
SOME_ROWS = ((32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 6), (64, 128, 4, 4), (64, 128, 8, 3), (64, 256, 4, 3))


@dataclass(frozen=True)
class Layer:
    """Weights and caches of one layer."""

    qkv: Linear
    output: torch.Tensor
    gate_up: Linear
    down: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]


@dataclass
class Choice:
    """Tiles that are tried instead of those that would be chosen."""

    linears: dict[tuple[int, int, bool, bool], Tile | None] = field(default_factory=dict)
    """By columns, depth, whether there is a norm before it and a gate behind it."""
    attention: dict[str, int] = field(default_factory=dict)
    """What is different in the tiles of attention."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, kernels are launched with these tiles."""
        choose_tile, decode_tiles = skinny.choose_tile, triton_paged.decode_tiles

        def linear(rows: int, columns: int, depth: int, **around: bool) -> Tile | None:
            place = (columns, depth, around.get("has_norm", False), around.get("is_gated", False))
            return self.linears[place] if place in self.linears else choose_tile(rows, columns, depth, **around)

        def attention(*given: Any) -> Tiles:
            return dataclasses.replace(decode_tiles(*given), **self.attention)

        with mock.patch.object(skinny, "choose_tile", linear):
            with mock.patch.object(triton_paged, "decode_tiles", attention):
                yield


class Step:
    """A step of decoding without its head: as many rows as there are sequences, each with as many tokens."""

    def __init__(self, shape: str, rows: int, context: int, block_size: int, device: str = "cuda") -> None:
        config = shape_config(shape)
        self.device = torch.device(device)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.attention = AttentionLayer(
            index=0,
            group=0,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            key_width=self.width,
            value_width=self.width,
            scale=self.width**-0.5,
        )
        per_seq = -(-context // block_size)
        self.batch = self._batch(rows, context, block_size, per_seq)
        blocks = (rows * per_seq + 1, block_size, self.num_kv_heads, self.width)
        self.layers = [self._layer(config, blocks) for _ in range(config.num_hidden_layers)]
        self.x = self._random(1, rows, config.hidden_size, scale=1.0)
        gain = self._ones(self.width) if config.model_type == "qwen3" else None
        cos, sin = (self._random(1, rows, self.width, scale=1.0) for _ in range(2))
        self.heads = Heads(cos, sin, gain, gain, EPS)
        triton_paged.prepare([self.attention], self.device)

    def _random(self, *shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPE) * scale

    def _ones(self, width: int) -> torch.Tensor:
        return torch.ones(width, device=self.device, dtype=DTYPE)

    def _layer(self, config: Any, blocks: tuple[int, ...]) -> Layer:
        hidden, inner = config.hidden_size, config.intermediate_size
        all_heads = (self.num_heads + 2 * self.num_kv_heads) * self.width
        return Layer(
            qkv=Linear(self._random(all_heads, hidden), gain=self._ones(hidden), eps=EPS),
            output=self._random(hidden, self.num_heads * self.width),
            gate_up=Linear(self._random(2 * inner, hidden), gain=self._ones(hidden), eps=EPS, is_gated=True),
            down=self._random(hidden, inner),
            caches=(self._random(*blocks, scale=1.0), self._random(*blocks, scale=1.0)),
        )

    def _batch(self, rows: int, context: int, block_size: int, per_seq: int) -> AttentionBatch:
        """Sequences in scattered blocks, the last token of each being new."""
        table = (torch.randperm(rows * per_seq, device=self.device) + 1).view(rows, per_seq)
        last = context - 1
        return AttentionBatch(
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=self.device),
            seq_lens=torch.full((rows,), context, dtype=torch.int32, device=self.device),
            block_table=table.int(),
            slots=table[:, last // block_size] * block_size + last % block_size,
            block_size=block_size,
            max_query_len=1,
            max_seq_len=max(context, 32768),  # a bucket's bound is rarely close
        )

    def run(self) -> torch.Tensor:
        x, rows = self.x, self.x.shape[1]
        widths = [count * width for count, width in self.attention.heads]
        for layer in self.layers:
            qkv = skinny.multiply(x, layer.qkv, early=True).split(widths, -1)
            out = torch.empty(rows, self.num_heads, self.width, device=self.device, dtype=DTYPE)
            triton_paged.attend_turned(*qkv, self.heads, out, None, *layer.caches, self.attention, self.batch)
            x = skinny.multiply(out.view(1, rows, -1), Linear(layer.output, residual=x), early=True)
            inner = skinny.multiply(x, layer.gate_up, early=True)
            x = skinny.multiply(inner, Linear(layer.down, residual=x), early=True)
        return x

    def places(self) -> list[tuple[int, int, bool, bool]]:
        """Of its linears: see :attr:`Choice.linears`."""
        layer = self.layers[0]
        linears = (layer.qkv, Linear(layer.output), layer.gate_up, Linear(layer.down))
        return [(each.num_columns, each.weight.shape[1], each.gain is not None, each.is_gated) for each in linears]


def timed(step: Step, choice: Choice) -> tuple[float, torch.Tensor]:
    """Microseconds of a layer, and what the last one gives."""
    with choice.installed():
        step.run()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step.run()
    graph.replay()
    torch.cuda.synchronize()
    found = out.clone()
    return measure(graph.replay, Effort(0.05, 30)).median_ms * 1e3 / len(step.layers), found


def tune(name: str, step: Step) -> None:
    """Each kernel in turn, with the best found so far of the others."""
    best = Choice()
    best_us, expected = timed(step, best)
    show(name, "as chosen", best_us)
    for what, choice in choices(step):
        tried = Choice({**best.linears, **choice.linears}, choice.attention or best.attention)
        try:
            us, found = timed(step, tried)
        except Exception as error:  # noqa: BLE001 # too large for the chip: the next one
            print(f"{name:<28} {what:<52} {type(error).__name__}", flush=True)
            torch.cuda.synchronize()
            continue
        error_of_it = relative_error(found, expected)
        assert error_of_it < MAX_ERROR, f"{what}: wrong result, relative error {error_of_it:.3g}"
        if us < 0.998 * best_us:
            best, best_us = tried, us
            show(name, what, us)
    print(f"{name:<28} best: {best}", flush=True)


def choices(step: Step) -> Iterator[tuple[str, Choice]]:
    """One kernel with other tiles, and what that is in words."""
    rows = step.x.shape[1]
    for block_n, num_warps, num_stages in itertools.product([32, 64, 128], [2, 4], [2, 3]):
        tiles = {"block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}
        yield f"attention {tiles}", Choice(attention=tiles)
    for place in dict.fromkeys(step.places()):
        for tile in one_row_tiles() if rows == 1 else several_rows_tiles(place[1]):
            yield f"{place[0]} x {place[1]} {tile and tuple(tile)}", Choice({place: tile})


def one_row_tiles() -> Iterable[Tile]:
    for columns, depth, num_warps, ahead in itertools.product([1, 2, 4], [512, 1024, 2048], [2, 4, 8], [1, 2]):
        if 1024 <= columns * depth <= 4096:
            yield Tile("one_row", columns, depth, num_warps, ahead)


def several_rows_tiles(depth: int) -> Iterable[Tile | None]:
    yield None  # cuBLAS, or ours behind kernels for what is around it
    yield from (Tile("some_rows", *sizes) for sizes in SOME_ROWS)
    for columns, part, num_warps, num_stages in itertools.product([8, 16, 32], [64, 128, 256], [4, 8], [2, 3, 4]):
        if depth % (part * num_warps) == 0:
            yield Tile("narrow", columns, part, num_warps, num_stages)


def show(name: str, what: str, us: float) -> None:
    print(f"{name:<28} {what:<52} {us:8.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help=f"one or more of {', '.join(SHAPES)}")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="sequences of a step (1 8 64)")
    parser.add_argument("--context", type=int, default=160, help="tokens of each (160)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a block of the cache")
    parser.add_argument("--tune", action="store_true", help="try other tiles")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "a CUDA device is needed\n")
    print(hardware(), f"{arguments.context} tokens of context, medians over 30 replays of all layers")
    for shape, rows in itertools.product(arguments.shape or SHAPES, arguments.rows):
        step = Step(shape, rows, arguments.context, arguments.block_size)
        name = f"{shape}, {rows} rows"
        if arguments.tune:
            tune(name, step)
        else:
            show(name, "as chosen", timed(step, Choice())[0])


if __name__ == "__main__":
    with torch.no_grad():
        main()
