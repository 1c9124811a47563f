"""Whether a decoder of which only some layers were traced is the decoder: both run once, and every bit is compared.

What a cache, experts or other ranks would give is not known when this runs, and need not be: the same stands in for it
on both sides. See Note [Equal layers] in :mod:`piecegraph.graph.equal_layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from piecegraph.base.compare import is_telling, same_bits
from piecegraph.engine.trace_check import interpret
from piecegraph.graph.example import Example, sizes_of
from piecegraph.graph.tracer import Traced
from piecegraph.llm import ops
from piecegraph.llm.model.trace_cache import TraceCache
from piecegraph.llm.ranks import collectives


@dataclass(frozen=True)
class TracedDecoder:
    """A decoder as it was traced, and what it can be compared with."""

    traced: Traced
    forward: Callable[..., torch.Tensor]
    """What was traced."""
    example: Example
    cache: TraceCache

    @torch.no_grad()
    def is_right(self) -> bool:
        """Whether it gives the decoder's own values to the bit. The weights must be there."""
        tensors = [tensor.clone() for tensor in self.example.tensors]
        args, kwargs = self.example.with_tensors(tensors)
        with ops.current_sites(_StandIns()), collectives.alone():
            try:
                with self.cache.installed():
                    expected = self.forward(*args, **kwargs)
                (found,) = interpret(self.traced, tensors, sizes_of(self.traced.signature, self.example)).values()
            except torch.OutOfMemoryError:
                raise
            except Exception:  # noqa: BLE001 - whatever it is, all layers are traced then, which tells if it is wrong
                return False
            return found.shape == expected.shape and same_bits(found, expected) and is_telling(expected)


class _StandIns:
    """At every call site: what is given, mixed, so that whatever reaches the site reaches its result."""

    def run(self, op: str, site: int, inputs: tuple[Any, ...]) -> None:
        out = inputs[ops.OUTPUTS[op]]
        given = [each for each in inputs if isinstance(each, torch.Tensor) and each is not out]
        places = torch.arange(out.numel(), device=out.device)
        mixed = torch.stack([each.reshape(-1)[places % each.numel()].float() for each in given]).mean(0)
        out.copy_(mixed.view(out.shape))
