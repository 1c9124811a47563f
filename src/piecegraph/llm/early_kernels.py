"""Compiles our Triton kernels in a thread, while the pieces are being compiled.

They are compiled when they are first launched, one after the other, which for a small model takes as long as Inductor
does. What they are launched with is known as soon as the model is traced. So a thread launches each of them once, on
dummies, with the sizes that will be recorded. Most of a compile is C++ and a process of its own, which do not hold
Python up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx
import torch.nn.functional as F

from piecegraph import torch_compat
from piecegraph.llm.attention.kernel import AttentionKernel
from piecegraph.llm.batch import BatchBuffers, BatchLimits
from piecegraph.llm.layers import AttentionLayer, LatentLayer
from piecegraph.llm.linear import launch_linear
from piecegraph.llm.memory import Memory
from piecegraph.llm.step import Bucket
from piecegraph.plan import Decision


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer, as far as kernels differ by it."""

    columns: int
    depth: int
    has_bias: bool


def linear_shapes(graph: torch.fx.Graph) -> tuple[LinearShape, ...]:
    """The distinct linears of a traced decoder."""
    target = torch_compat.op_of(F.linear)[0]
    found: dict[LinearShape, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and torch_compat.op_of(node.target)[0] is target:
            weight, bias = node.args[1], (*node.args, None)[2]
            columns, depth = torch_compat.meta_value(weight).shape
            found[LinearShape(int(columns), int(depth), bias is not None)] = None
    return tuple(found)


class EarlyKernels:
    """Launches every kernel once, in a thread.

    Args:
        kernel: what attends.
        layers: the call sites of attention.
        linears: of the decoder.
        head: of the model.
        buckets: what will be recorded.
        limits: of the batches.
        dtype: of everything.
        device: a GPU.
    """

    def __init__(
        self,
        kernel: AttentionKernel,
        layers: Sequence[AttentionLayer | LatentLayer],
        linears: Sequence[LinearShape],
        head: LinearShape | None,
        *,
        buckets: Iterable[Bucket],
        limits: BatchLimits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kernel = kernel
        self._layers = _distinct(layers)
        self._linears = linears
        self._head = head
        self._buckets = tuple(buckets)
        self._limits = limits
        self._dtype = dtype
        self._device = device
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="piecegraph early kernels", daemon=True)

    def start(self) -> None:
        """Begin, and return at once."""
        self._thread.start()

    def wait(self) -> Decision:
        """Until all are compiled. If that fails, they are compiled when first used, as they would have been."""
        self._thread.join()
        if self._error is not None:
            return Decision("our kernels", "compiled when first used", f"compiling them early failed: {self._error}")
        return Decision("our kernels", "compiled early", f"for {len(self._buckets)} sizes, while the pieces were")

    def _run(self) -> None:
        try:
            with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
                self._launch_all()
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to; the kernels are launched again later
            self._error = error

    def _launch_all(self) -> None:
        limits = self._limits
        memory = Memory(
            self._layers,
            self._kernel,
            (),
            None,
            dtype=self._dtype,
            device=self._device,
            block_size=limits.block_size,
        )
        memory.allocate([2] * limits.num_groups)
        buffers = BatchBuffers(replace(limits, embed_width=0), self._device)
        for bucket in self._buckets:
            buffers.fill_dummy(bucket)
            memory.use_batch(buffers, bucket)
            for site, layer in enumerate(self._layers):
                self._attend(memory, site, layer, bucket.num_tokens)
            for shape in self._linears:
                self._multiply(shape, bucket.num_tokens)
            if self._head is not None:
                self._multiply(self._head, bucket.num_seqs)

    def _attend(self, memory: Memory, site: int, layer: AttentionLayer, num_tokens: int) -> None:
        def zeros(heads: int, width: int) -> torch.Tensor:
            return torch.zeros(num_tokens, heads, width, dtype=self._dtype, device=self._device)

        query = zeros(layer.num_heads, layer.key_width)
        key, value = zeros(layer.num_kv_heads, layer.key_width), zeros(layer.num_kv_heads, layer.value_width)
        sinks = torch.zeros(layer.num_heads, dtype=self._dtype, device=self._device) if layer.has_sinks else None
        memory.attend(site, query, key, value, zeros(layer.num_heads, layer.value_width), sinks)

    def _multiply(self, shape: LinearShape, rows: int) -> None:
        launch_linear(rows, shape.columns, shape.depth, shape.has_bias, self._dtype, self._device)


def _distinct(layers: Sequence[AttentionLayer | LatentLayer]) -> list[AttentionLayer]:
    """Layers that differ in more than their place, numbered anew."""
    known = {replace(layer, index=0): None for layer in layers if isinstance(layer, AttentionLayer)}
    return [replace(layer, index=i) for i, layer in enumerate(known)]
