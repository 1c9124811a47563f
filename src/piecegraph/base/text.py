"""Numbers and names for readers, and JSON for programs."""

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


def duration(microseconds: float) -> str:
    """A time in the unit that suits it.

    >>> duration(3.14159), duration(12345.6), duration(2_500_000)
    ('3.1 us', '12.35 ms', '2.50 s')
    """
    if abs(microseconds) < 1000:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1e3:.2f} ms" if abs(microseconds) < 1e6 else f"{microseconds / 1e6:.2f} s"


def bytes_text(number: float) -> str:
    """A size in the unit that suits it.

    >>> bytes_text(512), bytes_text(3 * 2**20), bytes_text(2.5 * 2**30)
    ('512 B', '3.0 MiB', '2.5 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} GiB"


def printable(text: str) -> str:
    """Without what a terminal would obey: names come from files that anyone may have written.

    >>> printable("red \\x1b[31m")
    'red  [31m'
    """
    return "".join(char if char.isprintable() else " " for char in text)


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
