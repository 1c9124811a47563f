"""Numbers of things in words, and JSON for programs."""

from __future__ import annotations

import json
from typing import Any


def count_of(number: int, one: str, many: str = "") -> str:
    """A number of things.

    >>> count_of(1, "token"), count_of(4096, "token"), count_of(2, "process", "processes")
    ('1 token', '4,096 tokens', '2 processes')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def size_of(number: int, one: str) -> str:
    """The same as part of a name: its digits are not grouped.

    >>> size_of(4096, "token")
    '4096 tokens'
    """
    return count_of(number, one).replace(",", "")


def to_json(value: Any) -> str:
    """One JSON document, indented by two: by msgspec where it is installed. The text is the same.

    >>> print(to_json({"calls": 3, "sizes": []}))
    {
      "calls": 3,
      "sizes": []
    }
    """
    try:
        import msgspec
    except ImportError:
        return json.dumps(value, indent=2, ensure_ascii=False)
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
