"""JSON for programs: msgspec where it is installed, the standard library otherwise. The text is the same."""

from __future__ import annotations

import json
from typing import Any


def to_json(value: Any) -> str:
    """One JSON document, indented by two.

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
