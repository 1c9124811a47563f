"""Has our Triton kernels compiled while the pieces are.

They are compiled when they are first launched, one after the other, which for a small model takes longer than Inductor
does. What they are launched with is known as soon as the model is traced. So a thread goes through the launches of the
sizes that will be recorded, on dummies, and has others compile what it would launch: see Note [Copies that compile].
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
import torch.fx
import torch.nn.functional as F

from piecegraph.base import torch_compat
from piecegraph.base.plan import Decision
from piecegraph.llm.cache.memory import Memory
from piecegraph.llm.cache.states import StateKernels, StateMemory
from piecegraph.llm.kernels import skinny
from piecegraph.llm.kernels.attention.kernel import AttentionKernel
from piecegraph.llm.kernels.decode_pieces import most_rows
from piecegraph.llm.kernels.fused_linear import FusedLinear, find_gated, find_linears
from piecegraph.llm.kernels.turned_attention import find_turned
from piecegraph.llm.run.batch import BatchBuffers, BatchLimits
from piecegraph.llm.run.sampling import SamplingMode, sample
from piecegraph.llm.run.step import Bucket
from piecegraph.llm.specs import AttentionLayer, ConvLayer, DeltaLayer, LatentLayer, StatefulLayer, StateLayer

_DRAWING: tuple[SamplingMode, ...] = ("plain", "truncated")
_Layer = TypeVar("_Layer", AttentionLayer, ConvLayer | DeltaLayer)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer, as far as kernels differ by it."""

    rows_of_weight: int
    depth: int
    has_bias: bool = False
    has_norm: bool = False
    has_residual: bool = False
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class Shapes:
    """What kernels of ours a decoder launches beside attention."""

    plain: tuple[LinearShape, ...] = ()
    """Of all steps."""
    fused: tuple[LinearShape, ...] = ()
    """Of steps of decoding, if those have pieces of their own."""
    turned: Mapping[int, bool] = field(default_factory=dict)
    """Which call sites of attention turn heads, and whether they norm them before."""
    most_fused: int = 0
    """For so many sequences at most."""


def shapes_of(graph: torch.fx.Graph, *, has_decode_pieces: bool, fuses_gates: bool) -> Shapes:
    """The distinct ones of a traced decoder."""
    target = torch_compat.op_of(F.linear)[0]
    gated = {found.nodes[0] for found in find_gated(graph)} if fuses_gates else ()
    plain: dict[LinearShape, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and torch_compat.op_of(node.target)[0] is target:
            rows, depth = torch_compat.meta_value(node.args[1]).shape
            has_bias = (*node.args, None)[2] is not None
            plain[LinearShape(int(rows), int(depth), has_bias, is_gated=node in gated)] = None
    if not has_decode_pieces:
        return Shapes(tuple(plain))
    fused = dict.fromkeys(map(_fused_shape, find_linears(graph)))
    turned = {found.site: found.has_norm for found in find_turned(graph)}
    return Shapes(tuple(plain), tuple(fused), turned, most_rows(graph))


def _fused_shape(found: FusedLinear) -> LinearShape:
    rows, depth = map(int, torch_compat.meta_value(found.weight).shape)
    return LinearShape(
        rows, depth, found.bias is not None, found.norm is not None, found.residual is not None, found.is_gated
    )


class EarlyKernels:
    """Has every kernel compiled once. No kernel of Triton is launched.

    Args:
        kernel: what attends.
        layers: the call sites of attention.
        states: the call sites of layers with a state, and what computes those in fine form.
        shapes: of the decoder.
        head: the weight of the linear that makes logits, if there is one; steps of one sequence have a kernel for it.
        buckets: what will be recorded.
        limits: of the batches.
        dtype: of everything.
        device: a GPU.
        are_kept: whether all of them are on disk, and only have to be loaded.
    """

    def __init__(
        self,
        kernel: AttentionKernel,
        layers: Sequence[AttentionLayer | LatentLayer],
        states: tuple[Sequence[StateLayer], StateKernels],
        shapes: Shapes,
        head: torch.Tensor | None,
        *,
        buckets: Iterable[Bucket],
        limits: BatchLimits,
        dtype: torch.dtype,
        device: torch.device,
        are_kept: bool,
    ) -> None:
        self._kernel = kernel
        plain = [layer for layer in layers if isinstance(layer, AttentionLayer)]
        self._layers = _distinct(plain)
        self._turned = _distinct_turns(plain, shapes.turned)
        self._states = _distinct(layer for layer in states[0] if not isinstance(layer, StatefulLayer))
        self._state_kernels = states[1]
        self._shapes = shapes
        self._head = head
        # Those for long prompts take longest, so they are begun with; unless the launch itself compiles them.
        self._buckets = sorted(
            buckets,
            key=lambda bucket: (bucket.kind != "decode", bucket.num_tokens),
            reverse=not kernel.compiles_when_launched,
        )
        self._limits = limits
        self._dtype = dtype
        self._device = device
        self._are_kept = are_kept
        self._compilers: torch_compat.Compilers | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="piecegraph early kernels", daemon=True)

    def start(self) -> None:
        """Begin, and return at once."""
        self._compilers = None if self._are_kept else torch_compat.fork_compilers()
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
                with torch_compat.compiled_aside(self._device, self._compilers):
                    self._launch_all()
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a thread has nobody to raise to; the kernels are launched again later
            self._error = error
        finally:
            if self._compilers is not None:
                self._compilers.close()

    def _launch_all(self) -> None:
        limits = self._limits
        states = StateMemory(self._states, torch.nn.Module(), self._state_kernels, 1, self._device)
        memory = Memory(
            self._layers,
            self._kernel,
            (),
            states,
            dtype=self._dtype,
            device=self._device,
            block_size=limits.block_size,
        )
        memory.allocate([2] * limits.num_groups)
        buffers = BatchBuffers(replace(limits, embed_width=0), self._device)
        self._sample(buffers)
        for bucket in self._buckets:
            buffers.fill_dummy(bucket)
            memory.use_batch(buffers.views(bucket).attention, functools.partial(buffers.state_batch, bucket))
            for site, layer in enumerate(self._layers):
                for has_norm in self._turned[site]:
                    self._attend(memory, site, layer, bucket.num_tokens, has_norm)
            for state in self._states:
                self._mix(states, state, bucket.num_tokens)
            self._multiply(bucket)

    def _sample(self, buffers: BatchBuffers) -> None:
        """Logits that were adjusted are in single precision."""
        bucket = Bucket(1, 1, "decode")
        buffers.fill_dummy(bucket)
        views = buffers.views(bucket)
        for dtype in dict.fromkeys((self._dtype, torch.float32)):
            logits = self._zeros(1, self._limits.vocab_size, dtype=dtype)
            limits = views.temperature, views.top_k, views.top_p
            for mode in _DRAWING:
                sample(logits, *limits, views.random_keys, min_p=views.min_p, mode=mode)
            buffers.masks.keep_allowed(logits)

    def _multiply(self, bucket: Bucket) -> None:
        """The last piece may run on the rows alone that have logits, one for each sequence."""
        if bucket.has_few_rows(self._shapes.most_fused):
            for shape in self._shapes.fused:
                self._launch(shape, bucket.num_tokens, early=True)
            if self._head is not None and bucket.num_tokens == 1:
                skinny.launch_once(skinny.Linear(self._head), 1, early=True)
            return
        for rows in dict.fromkeys((bucket.num_tokens, bucket.num_seqs)):
            for shape in self._shapes.plain:
                self._launch(shape, rows, early=False)

    def _attend(self, memory: Memory, site: int, layer: AttentionLayer, num_tokens: int, has_norm: bool | None) -> None:
        """Args: has_norm: of heads that attention turns; None if it does not."""
        sinks = self._zeros(layer.num_heads) if layer.has_sinks else None
        out = self._zeros(num_tokens, layer.num_heads, layer.value_width)
        if has_norm is None:
            memory.run("attention", site, (*(self._zeros(num_tokens, *each) for each in layer.heads), out, sinks))
            return
        rows = self._zeros(1, num_tokens, sum(count * width for count, width in layer.heads))
        turn, gain = self._zeros(1, num_tokens, layer.key_width), self._zeros(layer.key_width) if has_norm else None
        memory.run("turned_attention", site, (rows, turn, turn, gain, gain, 0.0, out, sinks))

    def _mix(self, states: StateMemory, layer: ConvLayer | DeltaLayer, num_tokens: int) -> None:
        zeros = functools.partial(self._zeros, dtype=layer.dtype)
        if isinstance(layer, ConvLayer):
            hidden, weight = zeros(num_tokens, layer.channels), zeros(layer.channels, layer.width)
            bias = zeros(layer.channels) if layer.has_bias else None
            inputs = (hidden, weight, bias, torch.empty_like(hidden), layer.activation)
            states.run("causal_conv", layer.index, inputs)
            return
        query, value = (zeros(num_tokens, layer.num_heads, width) for width in (layer.key_width, layer.value_width))
        decay = zeros(num_tokens, layer.num_heads, dtype=layer.decay_dtype)
        beta = zeros(num_tokens, layer.num_heads, dtype=layer.beta_dtype)
        out = torch.empty_like(value)
        states.run("delta_rule", layer.index, (query, query, value, decay, beta, out, layer.normalises))

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self._dtype, device=self._device)

    def _launch(self, shape: LinearShape, rows: int, *, early: bool) -> None:
        weight = self._zeros(shape.rows_of_weight, shape.depth)
        linear = skinny.Linear(
            weight,
            self._zeros(shape.rows_of_weight) if shape.has_bias else None,
            self._zeros(shape.depth) if shape.has_norm else None,
            0.0,
            self._zeros(rows, shape.rows_of_weight) if shape.has_residual else None,
            shape.is_gated,
        )
        skinny.launch_once(linear, rows, early=early)


def _distinct_turns(layers: Sequence[AttentionLayer], turned: Mapping[int, bool]) -> list[dict[bool | None, None]]:
    """For each of :func:`_distinct`, the ways in which heads of such layers are turned."""
    ways: dict[AttentionLayer, dict[bool | None, None]] = {}
    for layer in layers:
        ways.setdefault(replace(layer, index=0), {})[turned.get(layer.index)] = None
    return list(ways.values())


def _distinct(layers: Iterable[_Layer]) -> list[_Layer]:
    """Layers that differ in more than their place, numbered anew."""
    known = dict.fromkeys(replace(layer, index=0) for layer in layers)
    return [replace(layer, index=i) for i, layer in enumerate(known)]
