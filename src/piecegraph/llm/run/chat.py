"""From a conversation to the tokens of a prompt, by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from piecegraph.errors import ModelError


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a tokenizer knows how conversations are written for its model."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_tokens(tokenizer: Any, conversation: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of a conversation, up to where the model's answer begins.

    Raises:
        ModelError: PG667, there is no template, or it refuses the conversation.
    """
    if not has_chat_template(tokenizer):
        raise _cannot_apply("the tokenizer has none")
    try:
        tokens = tokenizer.apply_chat_template(list(conversation), add_generation_prompt=True, return_dict=False)
    except (jinja2.TemplateError, ValueError, KeyError, TypeError) as error:
        raise _cannot_apply(f"{type(error).__name__}: {error}") from error
    return [int(token) for token in tokens]


def _cannot_apply(why: str) -> ModelError:
    return ModelError(
        "PG667", "the chat template cannot be applied", why=why, hint="write the prompt as the model was taught it"
    )
