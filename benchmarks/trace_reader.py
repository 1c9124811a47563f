"""How fast traces of torch.profiler are read: a made-up trace of an eager model, seconds, MB/s and peak memory.

python benchmarks/trace_reader.py                  # 100 MB
python benchmarks/trace_reader.py --megabytes 500
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

NUM_LAYERS = 32
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PYTHON_FRAMES = ("transformers/models/llama/modeling_llama.py(301): forward", "torch/nn/modules/module.py(1773): _wrap",
                 "torch/nn/modules/module.py(1784): _call", "torch/nn/modules/linear.py(124): forward")  # fmt: skip
SMALL_FRAMES = ("torch/nn/modules/module.py(1954): __getattr__", "<built-in function isinstance>",
                "<built-in method get of dict object at 0x7f0{:09x}>")  # fmt: skip


class Clock:
    """Numbers that go on over all steps."""

    def __init__(self) -> None:
        self.now = 3882882168239.434
        self.gpu_now = self.now + 500
        self.last_id = 0


def event(category: str, name: str, start: float, duration: float, args: dict[str, Any]) -> dict[str, Any]:
    fields = {"ph": "X", "cat": category, "name": name, "pid": 4711, "tid": 4711}
    return {**fields, "ts": round(start, 3), "dur": round(duration, 3), "args": args}


def linear(clock: Clock, module: int) -> Iterator[dict[str, Any]]:
    """One call of a linear: its Python frames, ops, launch, kernel and the arrow between the last two."""
    start = clock.now
    names = (f"nn.Module: Linear_{module}", *PYTHON_FRAMES)
    for depth, name in enumerate(names):
        yield event("python_function", name, start + depth, 60 - 2 * depth, {"Python parent id": depth, "Python id": 1})
    for number in range(8):
        name = SMALL_FRAMES[number % 3].format(clock.last_id)
        yield event("python_function", name, start + 6 + number, 0.5, {"Python parent id": 5, "Python id": 6})
    clock.last_id += 1
    args = {"External id": clock.last_id, "Sequence number": 5, "Fwd thread id": 0, "Record function id": 0,
            "Concrete Inputs": ["", "", ""], "Input type": ["c10::BFloat16", "c10::BFloat16", ""],
            "Input Strides": [[4096, 1], [4096, 1], []], "Input Dims": [[16, 4096], [4096, 4096], []]}  # fmt: skip
    for depth, op in enumerate(("aten::linear", "aten::matmul", "aten::mm")):
        yield event("cpu_op", op, start + 20 + depth, 30 - 2 * depth, {**args, "Ev Idx": clock.last_id})
    launch = {"External id": clock.last_id, "cbid": 211, "correlation": clock.last_id}
    yield event("cuda_runtime", "cudaLaunchKernel", start + 30, 5, launch)
    sizes = {"registers per thread": 168, "shared memory": 0, "blocks per SM": 2.67, "warps per SM": 10.67}
    kernel = {"External id": clock.last_id, "queued": 0, "device": 0, "context": 1, "stream": 7,
              "correlation": clock.last_id, **sizes, "grid": [64, 1, 5], "block": [128, 1, 1],
              "est. achieved occupancy %": 17}  # fmt: skip
    gemm = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_64x6_tn_align8>(Params)"
    yield event("kernel", gemm, clock.gpu_now, 7, kernel) | {"pid": 0, "tid": 7}
    for phase, place in (("s", start + 30), ("f", clock.gpu_now)):
        yield {"ph": phase, "id": clock.last_id, "pid": 0, "tid": 7, "ts": place, "cat": "ac2g", "name": "ac2g"}
    clock.now, clock.gpu_now = start + 70, clock.gpu_now + 9


def events() -> Iterator[dict[str, Any]]:
    clock = Clock()
    while True:
        for layer in range(NUM_LAYERS):
            for number in range(len(LINEARS)):
                yield from linear(clock, layer * len(LINEARS) + number)


def write(file: IO[bytes], num_bytes: int) -> None:
    """As a profiler writes it, with an event's fields on lines of their own."""
    file.write(b'{"schemaVersion": 1,\n"deviceProperties": [{"id": 0, "name": "a GPU"}],\n"traceEvents": [\n')
    written = 0
    for one in events():
        text = json.dumps(one, indent=1).encode()
        written += len(text) + 2
        file.write(text)
        if written >= num_bytes:
            break
        file.write(b",\n")
    file.write(b'],\n"traceName": "made up"}')


def measure(path: Path, decoder: str) -> None:
    """Read one trace in this process and print what it took."""
    if decoder == "json":
        sys.modules["msgspec"] = None  # type: ignore[assignment]  # as if it were not installed
    from piecegraph.provenance.profile.read import read_profile

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start, cpu_start = time.perf_counter(), time.process_time()
    trace = read_profile(path)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert all(launch.how == "stack" for launch in trace.launches)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    megabytes = path.stat().st_size / 1e6
    print(f"{megabytes:7.1f} {seconds:8.1f} {cpu_seconds:8.1f} {peak:9.0f} {before:9.0f} {len(trace.launches):10,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="of text, before gzip")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--decoder", default="msgspec", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.decoder)
        return
    print(f"{'file':<22} {'MB':>7} {'seconds':>8} {'of CPU':>8} {'peak MiB':>9} {'at start':>9} {'launches':>10}")
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
        with plain.open("wb") as file:
            write(file, int(options.megabytes * 1e6))
        with plain.open("rb") as file, gzip.open(packed, "wb", compresslevel=1) as copy:
            while block := file.read(1 << 20):
                copy.write(block)
        for path in (plain, packed):
            for decoder in ("msgspec", "json"):
                print(f"{path.name:<14} {decoder:<7} ", end="", flush=True)
                command = [sys.executable, __file__, "--measure", str(path), "--decoder", decoder]
                subprocess.run(command, check=True)  # a peak of its own


if __name__ == "__main__":
    main()
