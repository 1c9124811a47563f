"""Prefill of a Llama body: eager, torch.compile, breakable graphs and piecegraph side by side.

Attention is one causal SDPA for each request, an op between the graphs that reads the requests' lengths from the
host, as serving engines do. Outputs are compared before anything is timed. Run it on a GPU:

    python benchmarks/prefill.py                    # the Llama-1B shape of the README
    python benchmarks/prefill.py --tiny             # a few seconds, also on a CPU
    python benchmarks/prefill.py --start            # new processes: the stages of a cold and of a warm start
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaModel

import piecegraph
from piecegraph.base.compare import relative_error
from piecegraph.bench.machine import hardware
from piecegraph.bench.result import Timing
from piecegraph.bench.shapes import shape_config
from piecegraph.bench.timing import QUICK, Effort, measure
from results import Contender, save, table
from starts import STARTED_BY, Start, start_twice, tell_start

LADDER = [*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 2049, 256)]
TIMED = [16, 128, 256, 512, 1024, 2048]
MAX_ERROR = 0.05  # bf16 through 16 random layers, against eager; torch.compile gives 0.03
requests: list[int] = []
"""The lengths of the requests in the batch, as a scheduler would keep them."""


@torch.library.custom_op("pgbench::attention", mutates_args=("out",))
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    if requests == [q.shape[2]]:  # one request that fills the bucket
        out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2))
        return
    start = 0
    for length in requests:
        part = [tensor.narrow(2, start, length) for tensor in (q, k, v)]
        result = F.scaled_dot_product_attention(*part, is_causal=True, scale=scale, enable_gqa=True)
        out.narrow(1, start, length).copy_(result.transpose(1, 2))
        start += length


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    return None


def attend(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float = 1.0, **_: Any
) -> tuple[torch.Tensor, None]:
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])
    run_attention(q, k, v, out, scaling)
    return out, None


run_attention: Callable[..., None] = attention
AttentionInterface.register("pgbench", attend)


def build_model(device: torch.device, *, tiny: bool) -> LlamaModel:
    shape, changes = ("tiny", {"num_hidden_layers": 2}) if tiny else ("llama-1b", {})
    config = shape_config(shape, attn_implementation="pgbench", **changes)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaModel(config).to(torch.bfloat16).eval().requires_grad_(False)


class Bench:
    """The model, its inputs, and the outputs everyone must give."""

    def __init__(self, device: torch.device, sizes: list[int], ladder: list[int], *, tiny: bool) -> None:
        self.model = build_model(device, tiny=tiny)
        self.effort = QUICK if tiny else Effort()
        self.device = device
        self.sizes = sizes
        self.ids = torch.randint(0, 500, (max(sizes),), device=device)
        self.positions = torch.arange(max(sizes), device=device)
        self._warm_attention(ladder)
        self.expected = {n: self.forward(n).clone() for n in sizes}

    def _warm_attention(self, lengths: list[int]) -> None:
        """The attention library plans for every new length (cuDNN: 50 ms each), whoever calls it: done before all."""
        config = self.model.config
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        for n in lengths:
            shapes = [(1, n, count, config.head_dim) for count in heads]
            q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=self.device).transpose(1, 2) for shape in shapes)
            requests[:] = [n]
            attention(q, k, v, torch.empty(shapes[0], dtype=torch.bfloat16, device=self.device), 1.0)

    def inputs(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        requests[:] = [n]
        return self.ids[None, :n], self.positions[None, :n]

    def forward(self, n: int) -> torch.Tensor:
        return body(self.model, *self.inputs(n))

    def contend(self, name: str, run: Callable[[int], torch.Tensor], *, notes: dict[str, Any]) -> Contender:
        """Compare the outputs at every size, then time every size."""
        worst = max(relative_error(run(n), self.expected[n]) for n in self.sizes)
        if not worst <= MAX_ERROR:
            raise SystemExit(f"{name}: outputs differ from eager by {worst:.3g}")
        timings: dict[str, Timing] = {str(n): measure(lambda n=n: run(n), self.effort) for n in self.sizes}
        return Contender(name, timings, {**notes, "error": f"{worst:.1e}"})


def body(model: LlamaModel, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state


def run_eager(bench: Bench) -> Contender:
    return bench.contend("eager", bench.forward, notes={"build s": "0"})


def run_torch_compile(bench: Bench, mode: str) -> Contender:
    torch._dynamo.reset()
    start = time.perf_counter()
    compiled = torch.compile(lambda ids, positions: body(bench.model, ids, positions), mode=mode)

    def run(n: int) -> torch.Tensor:
        inputs = bench.inputs(n)
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 1)
        return compiled(*inputs)

    for n in bench.sizes * 2:
        run(n)
    return bench.contend(f"torch.compile {mode}", run, notes={"build s": f"{time.perf_counter() - start:.1f}"})


def run_breakable_peer(bench: Bench, ladder: list[int]) -> Contender:
    """Meta's breakable-cuda-graphs: no compiler, the attention op breaks the capture."""
    global run_attention
    from breakable_cuda_graphs import BreakableCUDAGraph, breakable_graph, no_graph

    run_attention = no_graph(attention._init_fn)
    free = torch.cuda.mem_get_info()[0]
    start = time.perf_counter()
    ids, positions = bench.ids.clone(), bench.positions.clone()
    graphs: dict[int, tuple[Any, torch.Tensor]] = {}
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    gc.collect()
    gc.freeze()
    for n in sorted(ladder, reverse=True):
        requests[:] = [n]
        with torch.cuda.stream(stream):
            body(bench.model, ids[None, :n], positions[None, :n])
        torch.cuda.synchronize()
        graph = BreakableCUDAGraph(pool=pool)
        with breakable_graph(graph, stream=stream):
            out = body(bench.model, ids[None, :n], positions[None, :n])
        graphs[n] = (graph, out)
    gc.unfreeze()
    torch.cuda.synchronize()
    notes = {
        "build s": f"{time.perf_counter() - start:.1f}",
        "graph MiB": f"{(free - torch.cuda.mem_get_info()[0]) / 2**20:.0f}",
    }

    def run(n: int) -> torch.Tensor:
        given_ids, given_positions = bench.inputs(n)
        ids[:n].copy_(given_ids[0])
        positions[:n].copy_(given_positions[0])
        graphs[n][0].replay()
        return graphs[n][1].clone()

    contender = bench.contend("breakable-cuda-graphs", run, notes=notes)
    run_attention = attention
    return contender


def start_piecegraph(bench: Bench, ladder: list[int]) -> Start:
    """Compile and record every size, and nothing else."""
    model, inputs = bench.model, bench.inputs(max(bench.sizes))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return body(model, input_ids, position_ids)

    def prepare(sizes: dict[str, int]) -> None:
        requests[:] = [sizes["s0"]]

    fast = piecegraph.compile(
        forward,
        splitting_ops=[attention],
        capture_sizes=ladder,
        dynamic_dims={"input_ids": 1, "position_ids": 1},
        options={"prepare": prepare},
    )
    fast.capture(*inputs)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall = time.perf_counter() - start
    cache = next((str(decision) for decision in fast.plan.decisions if decision.subject == "cache"), "")
    return Start(wall, fast.stats()["plans"][0]["seconds"], cache)


def run_piecegraph(bench: Bench, ladder: list[int], name: str, *, fuse: bool = False, **arguments: Any) -> Contender:
    start = time.perf_counter()
    model = bench.model
    free: list[int] = []

    def prepare(sizes: dict[str, int]) -> None:
        """Called before every run made for recording: the batch that the attention op finds, and the memory before
        the first.
        """
        requests[:] = [sizes["s0"]]
        if not free and torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return body(model, input_ids, position_ids)

    fast = piecegraph.compile(
        forward,
        splitting_ops=[attention],
        capture_sizes=ladder,
        dynamic_dims={"input_ids": 1, "position_ids": 1},
        options={"prepare": prepare, "fuse_linears": fuse},
        **arguments,
    )
    fast.capture(*bench.inputs(max(bench.sizes)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    built = time.perf_counter() - start
    plan = fast.stats()["plans"][0]
    recorded = sum(size["seconds"] for size in plan["sizes"].values())
    memory = (free[0] - torch.cuda.mem_get_info()[0]) / 2**20 if free else 0
    notes = {"build s": f"{built:.1f}", "record s": f"{recorded:.2f}", "graph MiB": f"{memory:.0f}"}
    contender = bench.contend(name, lambda n: fast(*bench.inputs(n)), notes=notes)
    stats = fast.stats()
    contender.notes["coverage"] = f"{stats['coverage']:.0%}"
    contender.notes["fallbacks"] = sum(stats["events"].values())
    print(
        {stage: round(seconds, 2) for stage, seconds in plan["seconds"].items()},
        {"compiles": stats["compiles"], "pieces": plan["pieces"]},
    )
    fast.close()
    return contender


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small shape and few sizes")
    parser.add_argument(
        "--only",
        default="",
        help="comma list of: inductor, fused, eager-pieces, compile, reduce-overhead, peer",
    )
    parser.add_argument("-o", "--output", help="write the results as JSON")
    parser.add_argument("--start", action="store_true", help="only start, in two new processes with one cache")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, ladder = ([8, 16], [8, 16]) if options.tiny else (TIMED, LADDER)
    if options.start:
        start_twice([__file__, "--only", "inductor"] + ["--tiny"] * options.tiny)
        return
    if STARTED_BY in os.environ:
        with torch.inference_mode():
            tell_start(start_piecegraph(Bench(device, sizes, ladder, tiny=options.tiny), ladder))
        return
    wanted = set(filter(None, options.only.split(",")))
    ways: dict[str, Callable[[Bench], Contender]] = {
        "eager": run_eager,
        "inductor": lambda bench: run_piecegraph(bench, ladder, "piecegraph"),
        "fused": lambda bench: run_piecegraph(bench, ladder, "piecegraph, fuse_linears", fuse=True),
        "eager-pieces": lambda bench: run_piecegraph(bench, ladder, "piecegraph, backend=eager", backend="eager"),
        "compile": lambda bench: run_torch_compile(bench, "default"),
        "reduce-overhead": lambda bench: run_torch_compile(bench, "reduce-overhead"),
    }
    if device.type == "cuda" and importlib.util.find_spec("breakable_cuda_graphs") is not None:
        ways["peer"] = lambda bench: run_breakable_peer(bench, ladder)
    elif not wanted or "peer" in wanted:
        print("peer is left out: it needs a GPU, and `pip install breakable-cuda-graphs`", file=sys.stderr)
    contenders = []
    with torch.inference_mode():
        bench = Bench(device, sizes, ladder, tiny=options.tiny)
        for name, way in ways.items():
            if not wanted or name in wanted or name == "eager":
                contenders.append(way(bench))
                print(table(contenders[-1:]), file=sys.stderr, flush=True)  # a run that is cut has told as much
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    print(f"\nprefill, {hardware()}; columns are tokens; {bench.effort}\n{table(contenders)}")
    if options.output:
        save(options.output, contenders)


if __name__ == "__main__":
    main()
