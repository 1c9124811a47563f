"""Rotations that transformers chooses by the longest sequence of a batch, held still.

Neighbours in a batch would change each other's answers, and keys that are cached cannot be rotated again. So what is
served at most decides once: the frequencies are those that transformers takes for a sequence of ``max_model_len``.

Note [Two sets of frequencies]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
``dynamic`` changes nothing up to the length that the model was made for, and longer sequences are not served. But
``longrope`` has two sets: one for sequences of up to ``original_max_position_embeddings`` tokens, another for all the
tokens of a longer one. Up to that length every answer is that of transformers, so it is the default. Who asks for more
gets the second set for all sequences, as with vLLM: long ones are right, short ones differ.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from piecegraph.base.plan import Decision

_MOVING_KINDS = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class _Rotation:
    """One kind of rotation of a module; some modules have one for each kind of layer."""

    name: str
    module: Any
    kind: str
    layer_type: str | None

    @property
    def short_len(self) -> int | None:
        """Tokens of a sequence for which another set of frequencies is made, if there are two."""
        if self.kind != "longrope":
            return None
        parameters = self.module.config.rope_parameters
        if self.layer_type is not None:
            parameters = parameters[self.layer_type]
        return int(parameters["original_max_position_embeddings"])

    def is_for_short(self, max_model_len: int) -> bool:
        """Whether a few tokens are rotated alike beside a sequence of a length."""
        return self.short_len is None or max_model_len <= self.short_len

    def hold(self, max_model_len: int) -> Decision:
        """Make it one for sequences of a length, whatever runs."""
        # Inside the decorators is the plain rotation by the frequencies that the module holds.
        self.module.forward = types.MethodType(inspect.unwrap(type(self.module).forward), self.module)
        subject, short = f"rotation {self.name}", self.short_len
        if self.is_for_short(max_model_len):
            reason = f"{self.kind} has others for longer sequences than are served"
            return Decision(subject, "the frequencies of short sequences", reason)
        buffer, of_layers = "inv_freq", {}
        if self.layer_type is not None:
            buffer, of_layers = f"{self.layer_type}_inv_freq", {"layer_type": self.layer_type}
        device = getattr(self.module, buffer).device
        of_long, _ = ROPE_INIT_FUNCTIONS[self.kind](self.module.config, device, seq_len=max_model_len, **of_layers)
        setattr(self.module, buffer, of_long)
        reason = f"max_model_len is above {short}: transformers has others for sequences of up to {short} tokens,"
        return Decision(subject, "the frequencies of long sequences", f"{reason} so those get other answers here")


def short_length(model: torch.nn.Module) -> int | None:
    """The most tokens of a sequence for which a model rotates as for short ones, if it does not do so for all."""
    return min((rotation.short_len for rotation in _moving(model) if rotation.short_len is not None), default=None)


def hold_rotations(model: torch.nn.Module, max_model_len: int) -> tuple[Decision, ...]:
    """Make the rotations of a model those of sequences of a length. See Note [Two sets of frequencies]."""
    return tuple(rotation.hold(max_model_len) for rotation in _moving(model))


def are_for_short(model: torch.nn.Module, max_model_len: int) -> bool:
    """Whether a model that is held for sequences of a length rotates a few tokens as transformers does."""
    return all(rotation.is_for_short(max_model_len) for rotation in _moving(model))


@contextlib.contextmanager
def own_rotations(model: torch.nn.Module) -> Iterator[None]:
    """Let transformers rotate by itself, for comparison."""
    held = {rotation.module: rotation.module.forward for rotation in _moving(model)}
    buffers = [(module, *named) for module in held for named in module.named_buffers(recurse=False)]
    for module in held:
        del module.forward
    try:
        yield
    finally:
        for module, forward in held.items():
            module.forward = forward
        # Transformers puts tensors of its own in their place, and what was traced reads those that were there before.
        for module, name, buffer in buffers:
            setattr(module, name, buffer)


def _moving(model: torch.nn.Module) -> Iterator[_Rotation]:
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind in _MOVING_KINDS:
                yield _Rotation(name, module, kind, layer_type)
