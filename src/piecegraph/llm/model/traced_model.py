"""A transformers model in, a compiled decoder and a head out, and what their call sites keep for each token.

The decoder takes a flat row of tokens with their positions; sequences lie one behind the other, and only attention (and
layers that keep a state) can tell them apart.

No name in a model's configuration is relied on: what a layer keeps for a token is read from the traced graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx

from piecegraph.base.config import Options
from piecegraph.base.events import EventLog
from piecegraph.base.plan import Cut, Decision, Piece
from piecegraph.base.progress import Progress, StageClock
from piecegraph.engine.layer_check import Layers
from piecegraph.engine.pipeline import Lowered, Pipeline, Variant
from piecegraph.engine.python_state import changes_python
from piecegraph.errors import ModelError, TraceError
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.equal_layers import find_stack
from piecegraph.graph.example import Example, read_example
from piecegraph.graph.fuse import PlaceWeight, place_by_copy
from piecegraph.graph.fx_nodes import put_below
from piecegraph.graph.interception import Interception
from piecegraph.graph.signature import Binder
from piecegraph.graph.split import find_intercepted
from piecegraph.graph.tracer import Traced
from piecegraph.llm import ops
from piecegraph.llm.kernels.decode_pieces import most_rows, use_fused_ops
from piecegraph.llm.kernels.early_launch import inductor_settings
from piecegraph.llm.kernels.fused_linear import FusedLinear
from piecegraph.llm.kernels.linear import linear_passes, use_outer_products
from piecegraph.llm.kernels.turned_attention import turn_in_attention
from piecegraph.llm.model.decoder import Decoder, make_decoder
from piecegraph.llm.model.head import Head, decoder_name, decoder_of
from piecegraph.llm.model.plug import UnsupportedCallError
from piecegraph.llm.model.positions import count_by_sequence, rows_of_positions
from piecegraph.llm.model.shards import Part
from piecegraph.llm.model.sites import number_experts, number_sites, number_states
from piecegraph.llm.model.trace_cache import TraceCache
from piecegraph.llm.ranks.collectives import ALL_REDUCE
from piecegraph.llm.specs import AttentionLayer, LatentLayer, Reach, StateLayer

_TRACED_TOKENS = 16


@dataclass(frozen=True)
class TracedSites:
    """What is known as soon as a model is traced."""

    graph: torch.fx.Graph
    """Of the decoder."""
    layers: tuple[AttentionLayer | LatentLayer, ...]
    """Its call sites of attention."""
    reaches: tuple[Reach, ...]
    """Of each group of them."""
    states: tuple[StateLayer, ...]
    """Its call sites of layers with a state."""
    pipeline: Pipeline
    """What is about to compile it."""


@dataclass(frozen=True)
class FewRows:
    """See Note [Pieces of their own for decoding]."""

    decoder: Decoder
    num_rows: int
    """For so many sequences at most."""


@dataclass(frozen=True)
class TracedModel:
    """A model, ready to be given memory."""

    traced: Traced
    """Its decoder, as it is cut where calls are intercepted: attention turns no heads in it."""
    pipeline: Pipeline
    """What cuts and compiles it."""
    decoder: Decoder
    few: FewRows | None
    """What steps of decoding with few sequences run, if not the same."""
    head: Head
    layers: tuple[AttentionLayer | LatentLayer, ...]
    """By call site."""
    states: tuple[StateLayer, ...]
    """What is kept for a sequence, by call site."""
    reaches: tuple[Reach, ...]
    """How far back the layers of each group see."""
    position_rows: int
    """See :func:`~piecegraph.llm.model.positions.rows_of_positions`."""
    steps: tuple[Piece | Cut, ...]
    num_compiles: int
    decisions: tuple[Decision, ...]

    def num_places(self, interception: Interception) -> int:
        """How many calls an interception is for."""
        return len(find_intercepted(self.traced.graph, [interception])) + self.head.num_places(interception)

    def intercepted(self, interceptions: Sequence[Interception]) -> Decoder:
        """The decoder, cut at intercepted ops as well; pieces that are the same are not compiled again."""
        return _decoder_of(self.traced, self.pipeline.cut(self.traced, interceptions))


def trace_model(
    model: Any,
    cache: TraceCache,
    *,
    backend: str | Callable[..., Any],
    options: Options,
    events: EventLog,
    takes_embeds: bool = False,
    position_rows: int | None = None,
    on_traced: Callable[[TracedSites], None] | None = None,
    deterministic: bool = False,
    decode_pieces: bool = False,
    fuse_gates: bool = False,
    part: Part | None = None,
    clock: StageClock | None = None,
    place_weight: PlaceWeight = place_by_copy,
) -> TracedModel:
    """Trace and compile a loaded model whose attention goes through our plug.

    Args:
        model: as transformers loaded it.
        cache: what stands where it would use a cache.
        backend: what compiles the pieces.
        options: of the compiler.
        events: where losses are told.
        takes_embeds: the decoder takes two inputs more, embeddings and which of its tokens have them.
        position_rows: in how many rows it takes positions. If there are several, the decoder takes one input more,
            ``mrope_positions``, behind the positions. None: that is found out.
        on_traced: called before the pieces are compiled.
        deterministic: its linears must not let a row depend on others.
        decode_pieces: steps of decoding with few sequences get pieces of their own, and heads are turned by attention.
        fuse_gates: gates become part of linears, if there is a kernel for that.
        part: which part of a model it is; None for all of it.
        clock: times its stages.
        place_weight: moves weights that are joined.
    """
    pipeline = Pipeline(
        type(model).__name__,
        backend,
        linear_passes(model.device, deterministic=deterministic, fuse_gates=fuse_gates),
        CutRules("auto"),
        options,
        events,
        # Ranks start at the same time: each of them compiles its own, which takes all cores.
        has_many_pieces=part is None and not takes_embeds,
        op_modules=(FusedLinear.__module__, use_outer_products.__module__),
        factors=_factors(cache, part, decode_pieces=decode_pieces),
        clock=clock or StageClock(),
    )
    with Progress(options.progress).bar("trace", 1):
        traced, position_rows, decisions = _read_decoder(model, cache, pipeline, takes_embeds, position_rows)
    number_experts(traced.graph, model)
    layers, reaches = number_sites(traced.graph)
    states = number_states(traced.graph, tuple(path for path, _ in cache.opaque))
    traced, fused = pipeline.fuse(traced, place_weight)
    if on_traced is not None:
        on_traced(TracedSites(traced.graph, layers, reaches, states, pipeline))
    turned = turn_in_attention(traced) if decode_pieces else traced
    lowered = pipeline.cut(turned)
    few = _few_rows(pipeline, turned, model.device) if decode_pieces else None
    pipeline.aside.end()
    return TracedModel(
        traced,
        pipeline,
        _decoder_of(turned, lowered),
        few,
        Head(model),
        layers,
        states,
        reaches,
        position_rows,
        lowered.steps,
        lowered.num_compiles,
        (*decisions, *fused, *pipeline.decisions),
    )


def _factors(cache: TraceCache, part: Part | None, *, decode_pieces: bool) -> dict[str, str]:
    """What a plan depends on besides the model and the call."""
    of_part = {} if part is None else {"part": str(part)}
    return {**cache.factors, **of_part, **({"decode pieces": "their own"} if decode_pieces else {})}


def _few_rows(pipeline: Pipeline, traced: Traced, device: torch.device) -> FewRows:
    variant = Variant("decode", (use_outer_products, use_fused_ops), inductor_settings(device))
    return FewRows(_decoder_of(traced, pipeline.cut_again(traced, variant)), most_rows(traced.graph))


def _decoder_of(traced: Traced, lowered: Lowered) -> Decoder:
    return make_decoder(traced, lowered.segments, lowered.program, lowered.dump)


def _read_decoder(
    model: Any, cache: TraceCache, pipeline: Pipeline, takes_embeds: bool, position_rows: int | None
) -> tuple[Traced, int, tuple[Decision, ...]]:
    """The decoder's graph, in how many rows it takes positions, and what was decided about it."""
    traced = _trace_decoder(model, cache, pipeline, takes_embeds, position_rows or 1)
    if position_rows is None:
        position_rows = rows_of_positions(traced, 1)
        if position_rows > 1:  # it makes several of one: it may take as many
            traced = _trace_decoder(model, cache, pipeline, False, position_rows)
    decisions = (*cache.decisions, *traced.decisions, *count_by_sequence(traced, 1, type(model).__name__))
    if position_rows == 1:
        return traced, position_rows, decisions
    reason = f"the decoder makes {position_rows} rows of the positions of a text"
    return traced, position_rows, (*decisions, Decision("positions", "in three dimensions", reason))


def _trace_decoder(model: Any, cache: TraceCache, pipeline: Pipeline, takes_embeds: bool, position_rows: int) -> Traced:
    decoder = decoder_of(model)

    def forward_of(decoder: Any) -> Callable[..., torch.Tensor]:
        return _forward_of(decoder, model.get_input_embeddings(), position_rows)

    forward = forward_of(decoder)
    args = _example_tensors(model, takes_embeds, position_rows)
    example = read_example(
        forward,
        Binder(forward),
        (),
        args,
        dynamic_dims={name: 1 if name == "mrope_positions" else 0 for name in args},
        static_inputs=(),
        training=False,
    )
    weights = dict(decoder.named_parameters(remove_duplicate=False)) | dict(
        decoder.named_buffers(remove_duplicate=False)
    )
    try:
        with cache.installed():
            traced = pipeline.trace(forward, example, weights, partial(_layers_of, decoder, forward_of, example))
        if traced.updates:  # nobody would set them: steps are padded, and run ahead of what is returned
            raise changes_python(", ".join(name for update in traced.updates for name in update.names))
    except TraceError as error:
        raise _refusal(model, error) from error
    put_below(traced.graph, decoder_name(model))
    return traced


_STUBS = {op: (site,) for op, site in ops.SITE_ARGS.items()} | {ALL_REDUCE: ()}
"""There is no cache yet, and no step that other ranks take part in. A trace numbers call sites afterwards."""


def _layers_of(
    decoder: Any, forward_of: Callable[[Any], Callable[..., torch.Tensor]], example: Example
) -> Layers | None:
    """Those of which only some need be traced. What they compute of weights that are still to come does not matter."""
    stack = find_stack(decoder, forward_of)

    def run(forward: Callable[..., torch.Tensor]) -> None:
        args, kwargs = example.with_tensors(example.tensors)
        with torch.no_grad():
            forward(*args, **kwargs)

    return None if stack is None else Layers(stack, run, _STUBS)


def _forward_of(decoder: Any, embed: Any, position_rows: int) -> Callable[..., torch.Tensor]:
    """What is traced: a decoder for a step of tokens of any sequences."""

    def forward(
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mrope_positions: torch.Tensor | None = None,
        input_embeds: torch.Tensor | None = None,
        has_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        positions = position_ids[None]
        if mrope_positions is not None:
            positions = mrope_positions[:, None]
            if position_rows > len(mrope_positions):
                positions = torch.cat((position_ids[None, None], positions))
        if input_embeds is None:
            hidden = decoder(input_ids=input_ids[None], position_ids=positions, use_cache=False)[0]
        else:
            rows = torch.where(has_embeds[:, None], input_embeds, embed(input_ids))  # type: ignore[index]
            hidden = decoder(inputs_embeds=rows[None], position_ids=positions, use_cache=False)[0]
        result: torch.Tensor = hidden[0]
        return result

    return forward


def _example_tensors(model: Any, takes_embeds: bool, position_rows: int) -> dict[str, torch.Tensor]:
    num_tokens, (num_rows, width) = _TRACED_TOKENS, model.get_input_embeddings().weight.shape
    with model.device:
        positions = torch.arange(num_tokens)
        args = {"input_ids": positions % num_rows, "position_ids": positions}
        if position_rows > 1:
            args["mrope_positions"] = positions[:, None].repeat(1, 3).t()  # laid out as in the batch
        if takes_embeds:
            args["input_embeds"] = torch.zeros(num_tokens, width, dtype=model.dtype)
            args["has_embeds"] = torch.zeros(num_tokens, dtype=torch.bool)
    return args


def _refusal(model: Any, error: TraceError) -> ModelError:
    if unsupported := re.search(rf"{UnsupportedCallError.__name__}\((['\"])(.*)\1\)", error.why):
        return ModelError("PG662", f"{type(model).__name__} cannot be run", where=error.where, why=unsupported[2])
    why = error.why if error.where else f"{error.what}: {error.why}"
    if "data-dependent" in why:
        why = "what happens here depends on values that only the device knows, so that no graph can hold it"
    return ModelError(
        "PG663",
        f"{type(model).__name__} cannot be traced",
        where=error.where,
        why=why,
        hint="run it with transformers itself, or report the family",
    )
