"""A request as a front passes it on to an engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_MOST_CHARACTERS = 2**14
"""Of a prompt's beginning: what is behind it does not change where a request goes."""


@dataclass(frozen=True, slots=True)
class PassedOn:
    """All that an engine needs of a request."""

    id: str
    method: str
    path: str
    query: bytes
    content_type: bytes
    body: bytes
    beginning: str
    """Of its prompt, for the router: see :func:`beginning_of`."""


def beginning_of(body: bytes) -> str:
    """What two requests have in common at least if their prompts begin alike. Of what is no JSON, nothing.

    >>> beginning_of(b'{"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}')
    '[{"role": "user", "content": "Hello'
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(given, dict):
        return ""
    said = [given.get(name) for name in ("tools", "system", "instructions")]
    prompt: Any = next((given[name] for name in ("messages", "prompt", "input") if name in given), "")
    text = "".join(each if isinstance(each, str) else json.dumps(each) for each in (*said, prompt) if each)
    return text.rstrip("]}\"' ")[:_MOST_CHARACTERS]
