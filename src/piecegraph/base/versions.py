"""Whether Python objects have changed since they were last looked at, without a look at what is in them.

CPython gives every change of a dictionary a number that no other has: its ``ma_version_tag``, which lies behind the
head of the object and its length. Python 3.11 and 3.12 have it. What class an object is of, and what code a function
runs, are words of their memory, too. Hundreds of such words are gathered at once, in a microsecond or two.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import numpy as np

_WORD = ctypes.sizeof(ctypes.c_uint64)
_CLASS = object.__basicsize__ - _WORD
_DICT_VERSION = object.__basicsize__ + _WORD


def _code_offset() -> int:
    def probe() -> None: ...

    words = (ctypes.c_uint64 * (probe.__sizeof__() // _WORD)).from_address(id(probe))
    return list(words).index(id(probe.__code__)) * _WORD


_CODE = _code_offset()


class Versions:
    """How often dictionaries have changed, what classes objects are of, what code functions run."""

    def __init__(
        self, dicts: Sequence[dict[Any, Any]], objects: Sequence[Any] = (), functions: Sequence[FunctionType] = ()
    ) -> None:
        kinds = ((dicts or [{}], _DICT_VERSION), (objects, _CLASS), (functions, _CODE))
        self._held = [each for held, _ in kinds for each in held]  # their memory is read
        places = np.array([id(each) + offset for held, offset in kinds for each in held])
        first = int(places.min())
        self._words = (places - first) // _WORD
        span = (ctypes.c_uint64 * (int(self._words.max()) + 1)).from_address(first)
        self._memory = np.frombuffer(memoryview(span), np.uint64)
        """From the first to the last of them. What lies between them is never read."""
        self.accept()

    def are_known(self) -> bool:
        """Whether none has changed since it was accepted."""
        return bool(self._memory.take(self._words).tobytes() == self._known)

    def changed(self) -> list[int]:
        """Which have: their numbers, dictionaries first, then objects, then functions."""
        now, known = self._memory.take(self._words), np.frombuffer(self._known, np.uint64)
        return [int(number) for number in np.flatnonzero(now != known)]

    def accept(self) -> None:
        """Take them as they are now."""
        self._known = self._memory.take(self._words).tobytes()


def class_dict(cls: type) -> dict[str, Any]:
    """The dictionary of a class itself, of which ``vars`` gives a view that has no version."""
    (found,) = (each for each in gc.get_referents(vars(cls)) if isinstance(each, dict))
    return found
