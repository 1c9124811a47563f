"""JSON as its standard has it. Python's reader also takes NaN, makes infinity of numbers that are too large, lets the
last of several values of one name win, and fails in its own way where too much is in each other.
"""

from __future__ import annotations

import json
import math
from typing import Any

_TWICE = object()
"""In the place of values that differ under one name, until it is known where that is."""


class NamedTwiceError(ValueError):
    """A name has two values, and nobody knows which is meant.

    Args:
        place: where: ``messages[0].content``.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        super().__init__(f"{place} is there twice, with different values")


def read_json(text: str | bytes, *, last_wins: bool = False) -> Any:
    """What a text says.

    Args:
        text: JSON.
        last_wins: whether a name may come twice: what a model wrote is read as most would read it.

    >>> read_json('{"a": [{"b": 1, "b": 2}]}')
    Traceback (most recent call last):
        ...
    piecegraph.serve.strict_json.NamedTwiceError: a[0].b is there twice, with different values

    Raises:
        ValueError: it is no JSON, or none that a client could have meant.
    """
    differing: list[str] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            # 1 and true are equal, and not the same.
            if not last_wins and name in found and repr(found[name]) != repr(value):
                differing.append(name)
                value = _TWICE
            found[name] = value
        return found

    try:
        read = json.loads(text, object_pairs_hook=object_of, parse_float=_finite, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("too much is in each other") from error
    if differing:
        raise NamedTwiceError(_place_of_twice(read))
    return read


def _finite(text: str) -> float:
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"the number {text[:40]} is too large")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of it")


def _place_of_twice(read: Any) -> str:
    """Not by recursion: there may be more in each other than is left of the stack."""
    left: list[tuple[str, Any]] = [("", read)]
    while left:
        place, value = left.pop()
        if value is _TWICE:
            return place
        if isinstance(value, dict):
            left += [(f"{place}.{name}" if place else name, each) for name, each in value.items()]
        elif isinstance(value, list):
            left += [(f"{place}[{number}]", each) for number, each in enumerate(value)]
    raise AssertionError("there is none")
