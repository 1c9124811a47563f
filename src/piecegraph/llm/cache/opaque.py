"""Modules that keep a state in a way only they know: run as they are, sequence by sequence, each with its own cache.

Always right, and slow: the module runs uncompiled and uncaptured, once for each sequence of a batch. Its state is a
cache object of transformers. One serves all layers of a sequence, because some families ask whether there is a
previous state without naming a layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from piecegraph.errors import ModelError
from piecegraph.llm.specs import Span, StatefulLayer

_PROBE = (10,)
_IN_CHUNKS = (6, 4)
_IN_STEPS = (6, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class _Mixer:
    module: torch.nn.Module
    takes_chunks: bool
    """Whether several tokens at once continue from a state. If not, they are given one by one."""


class OpaqueMixers:
    """The modules in opaque form of one model, and the caches of its sequences."""

    def __init__(self, layers: Sequence[StatefulLayer], decoder: torch.nn.Module, device: torch.device) -> None:
        self._config: Any = decoder.config
        self._caches: dict[int, DynamicCache] = {}
        self._mixers: dict[int, _Mixer] = {}
        self.num_bytes = 0
        """What they keep for one sequence."""
        probed: dict[type, tuple[bool, int]] = {}
        # From the last to the first: one that asks for a previous state without naming a layer is told of the last's.
        for layer in reversed(layers):
            module = decoder.get_submodule(layer.path)
            kind = type(module)
            if kind not in probed:
                probed[kind] = _probe(module, layer, self._config, device)
            takes_chunks, num_bytes = probed[kind]
            self._mixers[layer.index] = _Mixer(module, takes_chunks)
            self.num_bytes += num_bytes
        self._first = min(self._mixers, default=0)

    @torch.no_grad()
    def run(self, site: int, hidden: torch.Tensor, out: torch.Tensor, spans: Sequence[Span]) -> None:
        """Run one module over the sequences of a batch; rows of no sequence become zeros."""
        mixer = self._mixers[site]
        for span in spans:
            # All layers of a sequence share its cache: the first of them makes a new one when the sequence starts. A
            # warm-up may begin in the middle of a sequence.
            if (span.is_first and site == self._first) or span.slot not in self._caches:
                self._caches[span.slot] = DynamicCache(config=self._config)
            cuts = [span.end - span.start]
            if not (span.is_first or mixer.takes_chunks):
                cuts = [1] * cuts[0]
            rows = hidden[span.start : span.end]
            out[span.start : span.end] = _run(mixer.module, rows, cuts, self._caches[span.slot])
        out[spans[-1].end if spans else 0 :].zero_()

    def release(self, slot: int) -> None:
        """Forget a sequence."""
        self._caches.pop(slot, None)


def _run(module: torch.nn.Module, rows: torch.Tensor, cuts: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """The module over the rows of one sequence, as many at once as the cuts say."""
    parameters = inspect.signature(type(module).forward).parameters
    keyword = "cache_params" if "cache_params" in parameters else "past_key_values"
    results = []
    for part in rows.split(list(cuts)):
        result = module(part[None], **{keyword: cache})
        results.append((result[0] if isinstance(result, tuple) else result)[0])
    return torch.cat(results) if len(results) > 1 else results[0]


@torch.no_grad()
def _probe(module: torch.nn.Module, layer: StatefulLayer, config: Any, device: torch.device) -> tuple[bool, int]:
    """Try how a module continues from its state: in chunks or only step by step. Also tells the bytes it keeps.

    Some (Mamba's first version) take a state into account for a single token only, and start from nothing otherwise,
    without a word.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(_PROBE), layer.width, generator=generator).to(device, layer.dtype)
    cache = DynamicCache(config=config)
    expected = _run(module, rows, _PROBE, cache)
    if expected.shape != rows.shape:
        raise _refusal(module, layer, f"it makes rows of shape {tuple(expected.shape)} from {tuple(rows.shape)}")
    for cuts in (_IN_CHUNKS, _IN_STEPS):
        if _is_close(_run(module, rows, cuts, DynamicCache(config=config)), expected):
            return cuts is _IN_CHUNKS, _num_bytes(cache)
    raise _refusal(module, layer, "given a sequence in parts, its state does not lead to the result of the whole")


def _is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = 1e-3 if result.dtype == torch.float32 else 5e-2
    difference = (result.float() - expected.float()).abs().max()
    return bool(difference <= tolerance * (1 + expected.float().abs().max()))


def _num_bytes(cache: Any) -> int:
    return sum(
        tensor.nbytes
        for layer in cache.layers
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
        for tensor in states.values()
        if tensor is not None
    )


def _refusal(module: torch.nn.Module, layer: StatefulLayer, why: str) -> ModelError:
    return ModelError("PG662", f"a layer of class {type(module).__name__} cannot be run", where=layer.path, why=why)
