"""Layers that keep a state and latent attention, traced and run on ragged batches, against transformers itself."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

from piecegraph.base.config import Options
from piecegraph.base.events import EventLog
from piecegraph.errors import ModelError
from piecegraph.llm import ops
from piecegraph.llm.cache import memory
from piecegraph.llm.cache.states import StateMemory, state_bytes
from piecegraph.llm.kernels.state_plain import PlainStates
from piecegraph.llm.model import plug
from piecegraph.llm.model.trace_cache import TraceCache, cache_for
from piecegraph.llm.model.traced_model import TracedModel, trace_model
from piecegraph.llm.specs import Accepted, ConvLayer, DeltaLayer, LatentLayer, Span, StateBatch, StatefulLayer
from tests.cases.llms import VOCABULARY, tiny_model

NUM_SLOTS = 8
CPU = torch.device("cpu")
OPAQUE = (("linear_attention", "opaque"),)
EXPANDED = (("latent_cache", False),)

FAMILIES = {
    "qwen3_next": ("qwen3_next", (), {ConvLayer, DeltaLayer}),
    "qwen3_next, opaque": ("qwen3_next", OPAQUE, {StatefulLayer}),
    "qwen3_5": ("qwen3_5", (), {ConvLayer, DeltaLayer}),
    "olmo_hybrid, opaque": ("olmo_hybrid", OPAQUE, {StatefulLayer}),
    "lfm2": ("lfm2", (), {ConvLayer}),
    "mamba": ("mamba", (), {StatefulLayer}),
    "mamba2": ("mamba2", (), {StatefulLayer}),
    "bamba": ("bamba", (), {StatefulLayer}),
    "jamba": ("jamba", (), {StatefulLayer}),
    "falcon_h1": ("falcon_h1", (), {StatefulLayer}),
    "deepseek_v3": ("deepseek_v3", (), set()),
    "deepseek_v3, expanded": ("deepseek_v3", EXPANDED, set()),
}


class DenseSites:
    """Attention over everything that a slot has seen, the states under test, and padding that would be noticed.

    The rows behind the real tokens are made NaN before every op, and so is the memory an op writes to; the op must
    leave zeros there.
    """

    def __init__(self, model: TracedModel, states: StateMemory, experts: tuple[torch.nn.Module, ...]) -> None:
        self.layers, self.memory, self.modules = model.layers, states, experts
        self.seen: dict[tuple[int, int], list[torch.Tensor]] = {}
        nothing = torch.zeros(0)
        self.batch = StateBatch(query_starts=nothing, seq_lens=nothing, state_slots=nothing, spans=(), max_query_len=1)

    def use_batch(self, batch: StateBatch) -> None:
        self.batch = batch
        self.memory.use_batch(batch)

    def poison(self, *tensors: torch.Tensor) -> None:
        *inputs, out = tensors
        for tensor in inputs:
            tensor[self.batch.spans[-1].end :] = torch.nan
        out.fill_(torch.nan)

    def check(self, out: torch.Tensor) -> None:
        assert (out[self.batch.spans[-1].end :] == 0).all()

    def run(self, op: str, site: int, inputs: tuple[Any, ...]) -> None:
        getattr(self, op)(site, *inputs)

    def attention(self, site: int, query: Any, key: Any, value: Any, out: Any, sinks: Any) -> None:
        self._attend(site, query, torch.cat((key, value), -1), out, key.shape[-1])

    def latent_attention(self, site: int, query: Any, latent: Any, rope: Any, up_projection: Any, out: Any) -> None:
        layer = self.layers[site]
        assert isinstance(layer, LatentLayer)
        up = up_projection.view(layer.num_heads, -1, layer.latent_width)
        expanded = torch.einsum("tr,hdr->thd", latent, up)
        shared = rope[:, None].expand(-1, layer.num_heads, -1)
        nope, value = expanded.split((layer.nope_width, layer.value_width), -1)
        self._attend(site, query, torch.cat((nope, shared, value), -1), out, query.shape[-1])

    def _attend(self, site: int, query: Any, new: torch.Tensor, out: Any, key_width: int) -> None:
        out.zero_()
        for span in self.batch.spans:
            past = self.seen.setdefault((site, span.slot), [])
            if span.is_first:
                past.clear()
            past.append(new[span.start : span.end])
            rows = torch.cat(past).repeat_interleave(query.shape[1] // new.shape[1], 1)
            key, value = rows[..., :key_width], rows[..., key_width:]
            scores = torch.einsum("qhd,khd->hqk", query[span.start : span.end], key) * self.layers[site].scale
            is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(rows) - (span.end - span.start) + 1)
            weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
            out[span.start : span.end] = torch.einsum("hqk,khd->qhd", weights, value)

    def experts(self, site: int, hidden: Any, expert: Any, weight: Any, out: Any) -> None:
        out.copy_(memory.run_experts(self.modules[site], hidden, expert, weight))

    def stateful(self, site: int, hidden: Any, out: Any) -> None:
        self.poison(hidden, out)
        self.memory.run("stateful", site, (hidden, out))
        self.check(out)

    def causal_conv(self, site: int, hidden: Any, weight: Any, bias: Any, out: Any, activation: str) -> None:
        self.poison(hidden, out)
        self.memory.run("causal_conv", site, (hidden, weight, bias, out, activation))
        self.check(out)

    def delta_rule(self, site: int, *tensors: Any) -> None:
        inputs = tensors[:-1]
        self.poison(*inputs)
        self.memory.run("delta_rule", site, tensors)
        self.check(inputs[-1])


class Runner:
    """Feeds parts of sequences to a traced model. Sequence i has slot i + 1."""

    def __init__(self, name: str, **choices: Any) -> None:
        model = tiny_model(name, attn_implementation=plug.NAME, experts_implementation=plug.NAME)
        experts = plug.number_experts(model)
        self.cache = cache_for(model.base_model, **choices)
        with torch.no_grad():
            self.model = trace_model(model, self.cache, backend="eager", options=Options(), events=EventLog("raise"))
        self.memory = StateMemory(self.model.states, model.base_model, PlainStates(), NUM_SLOTS, CPU)
        self.sites = DenseSites(self.model, self.memory, experts)
        self.lengths: dict[int, int] = {}

    @torch.no_grad()
    def step(self, parts: dict[int, torch.Tensor], bucket: int) -> dict[int, torch.Tensor]:
        """Run the next tokens of some sequences in a batch of a size; returns the logits of each."""
        spans, positions, row = [], [], 0
        for sequence, tokens in parts.items():
            before = self.lengths.get(sequence, 0)
            spans.append(Span(row, row + len(tokens), before == 0, sequence + 1))
            positions.append(torch.arange(before, before + len(tokens)))
            self.lengths[sequence] = before + len(tokens)
            row += len(tokens)
        is_decode = all(len(tokens) == 1 for tokens in parts.values())
        self.sites.use_batch(
            StateBatch(
                query_starts=torch.tensor([span.start for span in spans] + [row] * (bucket + 1 - len(spans))).int(),
                seq_lens=_padded([self.lengths[i] for i in parts], bucket).int(),
                state_slots=_padded([i + 1 for i in parts], bucket),
                spans=tuple(spans),
                max_query_len=1 if is_decode else bucket,
            )
        )
        inputs = [_padded(torch.cat(list(parts.values())), bucket), _padded(torch.cat(positions), bucket)]
        if self.model.position_rows > 1:
            inputs.append(inputs[1].expand(3, -1))
        with ops.current_sites(self.sites):
            hidden = self.model.decoder.finish(self.model.decoder.run(inputs, bucket), bucket)
        logits = self.model.head(hidden[:row])
        return {i: logits[span.start : span.end] for i, span in zip(parts, spans, strict=True)}

    def start_again(self, sequence: int) -> None:
        """As after a preemption."""
        self.lengths.pop(sequence)


def _padded(values: Any, size: int) -> torch.Tensor:
    values = torch.as_tensor(values)
    return torch.cat((values, values.new_zeros(size - len(values))))


@functools.cache
def _runner(name: str, choices: tuple[tuple[str, Any], ...]) -> Runner:
    return Runner(name, **dict(choices))


@functools.cache
def _sequences() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(3, VOCABULARY, (length,), generator=generator) for length in (19, 14, 9))


@functools.cache
def _expected(name: str) -> tuple[torch.Tensor, ...]:
    model = tiny_model(name, attn_implementation="eager")
    with torch.no_grad():
        return tuple(model(tokens[None], use_cache=False).logits[0] for tokens in _sequences())


STEPS: tuple[tuple[dict[int, int], int], ...] = (
    ({0: 7, 1: 5}, 16),  # two prompts
    ({0: 6, 2: 1}, 12),  # a chunk, and a prompt of one token
    ({0: 1, 1: 4, 2: 3}, 8),  # decode beside chunks, nothing padded
    ({2: 1, 0: 1, 1: 1}, 4),  # decode
    ({1: 1, 2: 1}, 2),
    ({0: 1}, 1),
    ({1: 3, 0: 1, 2: 1}, 8),
    ({0: 2}, 2),
)
"""How many tokens of which sequences each batch has, and its size."""


def _run_and_compare(runner: Runner, name: str) -> None:
    at = dict.fromkeys(range(3), 0)
    for counts, bucket in STEPS:
        parts = {i: _sequences()[i][at[i] : at[i] + count] for i, count in counts.items()}
        for i, logits in runner.step(parts, bucket).items():
            expected = _expected(name)[i][at[i] : at[i] + counts[i]]
            torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
            at[i] += counts[i]


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_batches(family: str) -> None:
    """Prefill, chunks, mixed and decode batches, padded and not; then all of it again in the same slots."""
    name, choices, kinds = FAMILIES[family]
    runner = _runner(name, choices)
    assert {type(layer) for layer in runner.model.states} == kinds
    for _ in range(2):
        _run_and_compare(runner, name)
        for sequence in range(3):
            runner.start_again(sequence)


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_a_released_slot_serves_another_sequence(family: str) -> None:
    runner = _runner(*FAMILIES[family][:2])
    first, second = _sequences()[0][:4], _sequences()[1][:5]
    runner.step({0: first}, 4)
    runner.memory.release(1)
    runner.start_again(0)
    logits = runner.step({0: second}, 8)[0]
    torch.testing.assert_close(logits, _expected(FAMILIES[family][0])[1][:5], atol=2e-3, rtol=2e-3)
    runner.start_again(0)


def test_decisions_tell_the_form() -> None:
    def chosen(family: str) -> list[tuple[str, str]]:
        return [(d.subject, d.choice) for d in _runner(*FAMILIES[family][:2]).cache.decisions]

    assert chosen("qwen3_5") == [("linear attention", "fine form")]
    assert chosen("mamba2") == [("linear attention", "opaque form")]
    assert chosen("deepseek_v3") == [("MLA", "latent cache")]
    assert chosen("deepseek_v3, expanded") == [("MLA", "expanded cache")]
    assert cache_for(tiny_model("llama").base_model) == TraceCache()


def test_latents_are_cached_unexpanded() -> None:
    layers = _runner("deepseek_v3", ()).model.layers
    assert [(layer.latent_width, layer.rope_width, layer.value_width) for layer in layers] == [(16, 8, 12)] * 2


def test_only_modules_in_opaque_form_forbid_capture() -> None:
    runners = [_runner(*FAMILIES[family][:2]) for family in ("qwen3_next", "mamba2")]
    fine, opaque = (runner.memory for runner in runners)
    assert [state_bytes(runner.model.states, NUM_SLOTS) for runner in runners] == [fine.num_bytes, 0]
    assert (fine.capture_safe("decode"), fine.unallocated_bytes(3)) == (Accepted(), 0)
    # One slot, one layer: 96 channels of 3 inputs, and 4 heads of 16 by 8.
    assert fine.num_bytes == 2 * NUM_SLOTS * 4 * (96 * 3 + 4 * 16 * 8)
    assert (opaque.capture_safe("decode") == Accepted(), opaque.num_bytes) == (False, 0)
    # One sequence, one layer: 160 channels of 4 inputs, and 8 heads of 16 by 16.
    assert opaque.unallocated_bytes(3) == 3 * 2 * 4 * (160 * 4 + 8 * 16 * 16)


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("qwen3_next").base_model
    mixer = model.layers[0].linear_attn
    names, kept = inspect.unwrap(type(mixer).forward).__globals__, dict(mixer.__dict__)
    rule = names["torch_chunk_gated_delta_rule"]
    for form in ("fine", "opaque"):
        with cache_for(model, linear_attention=form).installed():
            assert (names["torch_chunk_gated_delta_rule"] is rule) == (form == "opaque")
            assert ("forward" in mixer.__dict__) == (form == "opaque")
        assert names["torch_chunk_gated_delta_rule"] is rule
        assert mixer.__dict__ == kept


def test_a_fine_form_that_is_asked_for_and_not_there() -> None:
    with pytest.raises(ModelError, match=r"PG662 .*Mamba2Mixer.*layers\.0\.mixer.*no fine form"):
        cache_for(tiny_model("mamba2").base_model, linear_attention="fine")


class _Forgetful(torch.nn.Module):
    def forward(self, hidden_states: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
        return hidden_states.cumsum(1)


def test_a_state_that_does_not_carry_on_is_refused() -> None:
    decoder = torch.nn.Module()
    decoder.config, decoder.mixer = tiny_model("mamba2").config, _Forgetful()
    layer = StatefulLayer(index=0, path="mixer", width=4, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"PG662 .*_Forgetful.*mixer.*in parts"):
        StateMemory([layer], decoder, PlainStates(), NUM_SLOTS, CPU)
