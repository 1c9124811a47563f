"""What endpoints must know of a model besides asking it, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A model that is loaded."""

    path: str
    tokenizer_path: str
    """Where its tokenizer was read from,"""
    is_local: bool
    """and whether all of it was on this machine."""
    max_model_len: int
    longest: int
    """Tokens of a prompt and its answer at most, by the model's length and by its cache."""
    vocab_size: int
    defaults: dict[str, Any]
    """For what a request does not say: the API's, and those that come with the model."""
    response_template: dict[str, Any] | None
    """How the model marks tool calls and reasoning, if that is known."""
