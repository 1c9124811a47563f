"""Numbers and lists as callers give them: those of numpy and torch mean the same as Python's own."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any


def as_integer(value: Any) -> int | None:
    """The integer that is meant, or None. True is no number.

    >>> import numpy
    >>> as_integer(numpy.int32(4)), as_integer(2.0), as_integer(True)
    (4, None, None)
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_real(value: Any) -> float | None:
    """The number that is meant, or None if it is none or too large for one.

    >>> import numpy
    >>> as_real(numpy.float32(0.5)), as_real(1), as_real(10**400), as_real("1")
    (0.5, 1.0, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_list(value: Any) -> list[Any] | None:
    """The entries of anything that has some, arrays and tensors included; None if it has none. A text is one value.

    >>> import numpy
    >>> as_list(numpy.array([1, 2])), as_list((1, 2)), as_list(numpy.array(1)), as_list("ab")
    ([1, 2], [1, 2], None, None)
    """
    if type(value) in (list, tuple):  # as most are, and to ask an abstract class takes long
        return list(value)
    plain = value.tolist() if hasattr(value, "tolist") else value
    is_one = isinstance(plain, (str, bytes, bytearray, Mapping))
    return list(plain) if isinstance(plain, Iterable) and not is_one else None
