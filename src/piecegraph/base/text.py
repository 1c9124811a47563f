"""Numbers of things, in words."""

from __future__ import annotations


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
