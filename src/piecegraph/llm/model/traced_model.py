"""A transformers model in, a compiled decoder and a head out, and what their call sites keep for each token.

The decoder takes a flat row of tokens with their positions; sequences lie one behind the other, and only attention (and
layers that keep a state) can tell them apart. The head takes rows of hidden states and gives logits: it is the model's
own forward with the decoder left out, so that every family's scaling and capping of logits stays.

No name in a model's configuration is relied on: what a layer keeps for a token is read from the traced graph.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from transformers import PreTrainedModel

from piecegraph.base import torch_compat
from piecegraph.base.config import Options
from piecegraph.base.events import EventLog
from piecegraph.base.plan import Cut, Decision, Piece
from piecegraph.base.progress import Progress
from piecegraph.errors import ModelError, TraceError
from piecegraph.graph.cut_rules import CutRules
from piecegraph.graph.example import read_example
from piecegraph.graph.fuse import fuse_linears
from piecegraph.graph.fx_nodes import put_below
from piecegraph.graph.lower import Lowering, lower
from piecegraph.graph.signature import Binder
from piecegraph.graph.split import split
from piecegraph.graph.tracer import Traced, trace
from piecegraph.llm import ops
from piecegraph.llm.kernels.linear import linear_passes
from piecegraph.llm.model.decoder import Decoder, make_decoder
from piecegraph.llm.model.plug import UnsupportedCallError
from piecegraph.llm.model.positions import count_by_sequence, rows_of_positions
from piecegraph.llm.model.state_sites import number_states
from piecegraph.llm.model.trace_cache import TraceCache
from piecegraph.llm.specs import AttentionLayer, LatentLayer, Reach, StateLayer
from piecegraph.provenance.observe import is_attributing

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


@dataclass(frozen=True)
class TracedModel:
    """A model, ready to be given memory."""

    decoder: Decoder
    head: Callable[[torch.Tensor], torch.Tensor]
    """Rows of hidden states to rows of logits."""
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
    seconds: Mapping[str, float]


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
    """
    started = time.perf_counter()
    if backend == "inductor" and model.device.type == "cuda":
        torch_compat.start_compile_workers()  # they come up while the model is traced
    progress = Progress(options.progress)
    with progress.bar("trace", 1):
        traced, position_rows, decisions = _read_decoder(model, cache, takes_embeds, position_rows)
    layers, reaches = number_sites(traced.graph)
    states = number_states(traced.graph, tuple(path for path, _ in cache.opaque))
    traced_at = time.perf_counter()
    if options.fuse_linears:
        traced, decision = fuse_linears(traced)
        decisions = (*decisions, decision)
    if on_traced is not None:
        on_traced(TracedSites(traced.graph, layers, reaches, states))
    segments = split(traced, CutRules("auto"), full=False)
    provenance = options.provenance or is_attributing()
    lowering = Lowering(backend, linear_passes(model.device), options.inductor, provenance)
    program, num_compiles = lower(traced, segments, lowering, events, progress)
    seconds = {"trace": traced_at - started, "compile": time.perf_counter() - traced_at}
    return TracedModel(
        make_decoder(traced, segments, program),
        make_head(model),
        layers,
        states,
        reaches,
        position_rows,
        tuple(step.label for step in program.steps),
        num_compiles,
        decisions,
        seconds,
    )


def _read_decoder(
    model: Any, cache: TraceCache, takes_embeds: bool, position_rows: int | None
) -> tuple[Traced, int, tuple[Decision, ...]]:
    """The decoder's graph, in how many rows it takes positions, and what was decided about it."""
    traced = _trace_decoder(model, cache, takes_embeds, position_rows or 1)
    if position_rows is None:
        traced, position_rows = _with_all_rows(model, cache, traced)
    decisions = (*cache.decisions, *count_by_sequence(traced, 1, type(model).__name__))
    if position_rows == 1:
        return traced, position_rows, decisions
    reason = f"the decoder makes {position_rows} rows of the positions of a text"
    return traced, position_rows, (*decisions, Decision("positions", "in three dimensions", reason))


def _with_all_rows(model: Any, cache: TraceCache, traced: Traced) -> tuple[Traced, int]:
    """The decoder that takes positions in as many rows as it makes of one, if it makes several."""
    num_rows = rows_of_positions(traced, 1)
    return (traced, 1) if num_rows == 1 else (_trace_decoder(model, cache, False, num_rows), num_rows)


def _trace_decoder(model: Any, cache: TraceCache, takes_embeds: bool, position_rows: int) -> Traced:
    decoder, embed, num_tokens = decoder_of(model), model.get_input_embeddings(), _TRACED_TOKENS

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

    with model.device:
        args = {"input_ids": torch.zeros(num_tokens, dtype=torch.long), "position_ids": torch.arange(num_tokens)}
        if position_rows > 1:
            args["mrope_positions"] = torch.zeros(num_tokens, 3, dtype=torch.long).t()  # laid out as in the batch
        if takes_embeds:
            args["input_embeds"] = torch.zeros(num_tokens, embed.weight.shape[1], dtype=model.dtype)
            args["has_embeds"] = torch.zeros(num_tokens, dtype=torch.bool)
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
            traced = trace(forward, example, weights)
    except TraceError as error:
        raise _refusal(model, error) from error
    put_below(traced.graph, _decoder_name(model))
    return traced


def decoder_of(model: Any) -> torch.nn.Module:
    """The part of a causal language model below its head."""
    decoder: torch.nn.Module = getattr(model, _decoder_name(model))
    return decoder


def _decoder_name(model: Any) -> str:
    """Under which name a model has its decoder. Most say it themselves, some of them wrongly."""
    if model.base_model_prefix in model._modules:
        return str(model.base_model_prefix)
    for name, module in model._modules.items():
        if isinstance(module, PreTrainedModel):
            return str(name)
    raise ModelError(
        "PG662",
        f"{type(model).__name__} has no decoder apart from its head",
        why=f"it has no submodule {model.base_model_prefix!r}, nor another that is a model",
    )


def number_sites(graph: torch.fx.Graph) -> tuple[tuple[AttentionLayer | LatentLayer, ...], tuple[Reach, ...]]:
    """Number the attention calls of a traced graph in their order, and describe each.

    A module may be called twice in a forward, and layer numbers may repeat or be missing, so the call site is what a
    cache belongs to. Returns the layers and the reach of each group of layers.
    """
    layers: list[AttentionLayer | LatentLayer] = []
    groups: dict[Reach, int] = {}
    for node in graph.nodes:
        packet = torch_compat.op_of(node.target)[0] if node.op == "call_function" else None
        if packet is ops.ATTENTION.overloadpacket:
            group = groups.setdefault(Reach(node.args[7], node.args[8]), len(groups))
            layers.append(_attention_layer(node, len(layers), group))
            node.update_arg(5, layers[-1].index)
        elif packet is ops.LATENT_ATTENTION.overloadpacket:
            layers.append(_latent_layer(node, len(layers), groups.setdefault(Reach(), len(groups))))
            node.update_arg(5, layers[-1].index)
    return tuple(layers), tuple(groups)


def _attention_layer(node: torch.fx.Node, index: int, group: int) -> AttentionLayer:
    query, key, value = (torch_compat.meta_value(arg) for arg in node.args[:3])  # type: ignore[arg-type]
    scale, window, chunk, softcap = node.args[6:10]
    return AttentionLayer(
        index=index,
        group=group,
        num_heads=int(query.shape[1]),
        num_kv_heads=int(key.shape[1]),
        key_width=int(key.shape[2]),
        value_width=int(value.shape[2]),
        scale=scale,  # type: ignore[arg-type]
        window=window,  # type: ignore[arg-type]
        chunk=chunk,  # type: ignore[arg-type]
        softcap=softcap,  # type: ignore[arg-type]
        has_sinks=node.args[4] is not None,
    )


def _latent_layer(node: torch.fx.Node, index: int, group: int) -> LatentLayer:
    query, latent, rope, _, out = (torch_compat.meta_value(arg) for arg in node.args[:5])  # type: ignore[arg-type]
    return LatentLayer(
        index=index,
        group=group,
        num_heads=int(query.shape[1]),
        latent_width=int(latent.shape[1]),
        rope_width=int(rope.shape[1]),
        nope_width=node.args[6],  # type: ignore[arg-type]
        value_width=int(out.shape[2]),
        scale=node.args[7],  # type: ignore[arg-type]
    )


class _Hidden(dict):  # type: ignore[type-arg]
    """Whatever a head may read of its decoder's result; only the hidden states are there."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else None


class _NoDecoder(torch.nn.Module):
    """Stands where the decoder was: gives back the hidden states it is given. Its attributes are the decoder's."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["_decoder"] = decoder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["_decoder"], name)
        # Some heads call a decoder within the decoder.
        return _NoDecoder(found) if isinstance(found, PreTrainedModel) else found

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


def make_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's own forward without its decoder."""
    headless = copy.copy(model)
    headless.__dict__["_modules"] = dict(model._modules)
    headless._modules[_decoder_name(model)] = _NoDecoder(decoder_of(model))

    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = headless(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits
        return logits[0]

    return head


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
