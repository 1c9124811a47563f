"""Traces as torch.profiler writes them, made up: whoever makes one knows what is in it.

trace = TraceBuilder()
with trace.python("model.py(7): forward"), trace.op("aten::mm", dims=[[2, 8], [8, 8]]):
    trace.kernel("gemm", grid=(4, 1, 5))
    trace.memset()
with trace.annotation("decode"):
    trace.replay([("kernel", "gemm"), ("kernel", "reduce")])
trace.save(path)
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CPU_STEP_US = 2.0
"""Every beginning, end and launch takes this long on the CPU."""
GPU_STEP_US = 10.0
GPU_NAME = "NVIDIA Synthetic"
_CATEGORIES = {"kernel": "kernel", "memset": "gpu_memset", "memcpy": "gpu_memcpy"}


@dataclass
class TraceBuilder:
    """Events in the order in which a program would cause them. Time goes on by itself."""

    pid: int = 100
    tid: int = 100
    now: float = 1000.0
    gpu_now: float = 5000.0
    events: list[dict[str, Any]] = field(default_factory=list)
    last_id: int = 0
    open_external_ids: list[int] = field(default_factory=list)

    @contextlib.contextmanager
    def range(self, category: str, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        event: dict[str, Any] = {"ph": "X", "cat": category, "name": name, "pid": self.pid, "tid": self.tid}
        event |= {"ts": self._tick(), "args": args}
        self.events.append(event)
        yield event
        event["dur"] = self._tick() - event["ts"]

    @contextlib.contextmanager
    def op(self, name: str, dims: Sequence[Any] = (), types: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
        self.last_id += 1
        shapes = {"Input Dims": list(dims), "Input type": list(types) or ["float"] * len(dims)} if dims else {}
        self.open_external_ids.append(self.last_id)
        with self.range("cpu_op", name, **{"External id": self.last_id}, **shapes) as event:
            yield event
        self.open_external_ids.pop()

    def python(self, name: str) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """``model.py(7): forward``, or ``nn.Module: Linear_3``"""
        return self.range("python_function", name)

    def annotation(self, name: str) -> contextlib.AbstractContextManager[dict[str, Any]]:
        return self.range("user_annotation", name)

    @contextlib.contextmanager
    def thread(self, tid: int) -> Iterator[None]:
        before, self.tid = self.tid, tid
        yield
        self.tid = before

    def kernel(self, name: str, *, launcher: str = "cudaLaunchKernel", **details: Any) -> dict[str, Any]:
        """A kernel and the call that launches it; ``details``: see :meth:`work`. No launcher: no call."""
        return self.work("kernel", name, self.call(launcher) if launcher else self._correlation(), **details)

    def memset(self, **details: Any) -> dict[str, Any]:
        return self.work("memset", "Memset (Device)", self.call("cudaMemsetAsync"), **details)

    def memcpy(self, **details: Any) -> dict[str, Any]:
        return self.work("memcpy", "Memcpy HtoD (Pinned -> Device)", self.call("cudaMemcpyAsync"), **details)

    def replay(
        self, nodes: Sequence[tuple[str, str]], node_ids: Sequence[int] = (), graph_id: int = 0
    ) -> list[dict[str, Any]]:
        """One launch of a graph: (kind, name) of all that runs in it, and what the profiler tells of its nodes."""
        correlation = self.call("cudaGraphLaunch")
        work = [self.work(kind, name, correlation) for kind, name in nodes]
        for event, node_id in zip(work, node_ids, strict=False):
            event["args"] |= {"graph id": graph_id, "graph node id": node_id}
        return work

    def call(self, name: str, category: str = "cuda_runtime", correlation: int | None = None) -> int:
        """A call of the driver; its correlation."""
        correlation = self._correlation() if correlation is None else correlation
        with self.range(category, name, correlation=correlation, **self._external_id()):
            pass
        return correlation

    def work(
        self,
        kind: str,
        name: str,
        correlation: int,
        *,
        stream: int = 7,
        device: int = 0,
        duration: float = 5.0,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (128, 1, 1),
    ) -> dict[str, Any]:
        """Something that runs on the GPU."""
        args: dict[str, Any] = {"device": device, "stream": stream, "correlation": correlation, **self._external_id()}
        if kind == "kernel":
            args |= {"grid": list(grid), "block": list(block), "registers per thread": 32}
        event = {"ph": "X", "cat": _CATEGORIES[kind], "name": name, "pid": device, "tid": stream}
        event |= {"ts": self.gpu_now, "dur": duration, "args": args}
        self.gpu_now += max(duration, GPU_STEP_US)
        self.events.append(event)
        return event

    def document(self) -> dict[str, Any]:
        """The whole file, with the keys that a profiler writes before and after the events."""
        metadata = {"ph": "M", "name": "process_name", "pid": self.pid, "tid": 0, "args": {"name": "python"}}
        return {
            "schemaVersion": 1,
            "deviceProperties": [
                {"id": 0, "name": GPU_NAME},
                {"id": 1, "name": GPU_NAME},
                {"id": 2, "name": "another"},
            ],
            "traceEvents": [metadata, *self.events],
            "traceName": "made up",
        }

    def save(self, path: Path, **options: Any) -> Path:
        """Write the file; gzip if its name ends so. ``options`` are those of ``json.dumps``."""
        text = json.dumps(self.document(), **options).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    def _tick(self) -> float:
        self.now += CPU_STEP_US
        return self.now

    def _correlation(self) -> int:
        self.last_id += 1
        return self.last_id

    def _external_id(self) -> dict[str, int]:
        return {"External id": self.open_external_ids[-1]} if self.open_external_ids else {}
