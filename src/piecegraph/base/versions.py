"""Whether Python objects have changed since they were last looked at, without a look at what is in them.

CPython gives every change of a dictionary a number that no other has: its ``ma_version_tag``, which lies behind the
head of the object and its length. Python 3.11 and 3.12 have it. What class an object is of, what code a function runs
and what its defaults are, are words of their memory, too. Hundreds of such words are gathered at once, in a microsecond
or two.
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


def _function_offsets() -> tuple[int, ...]:
    def probe(first: int = 1, *, second: int = 2) -> None: ...

    words = list((ctypes.c_uint64 * (probe.__sizeof__() // _WORD)).from_address(id(probe)))
    return tuple(words.index(id(part)) * _WORD for part in (probe.__code__, probe.__defaults__, probe.__kwdefaults__))


_OF_FUNCTION = _function_offsets()


class Versions:
    """How often dictionaries have changed, what classes objects are of, what functions consist of."""

    def __init__(
        self, dicts: Sequence[dict[Any, Any]], objects: Sequence[Any] = (), functions: Sequence[FunctionType] = ()
    ) -> None:
        kinds = ((dicts or [{}], _DICT_VERSION), (objects, _CLASS), *((functions, offset) for offset in _OF_FUNCTION))
        self._held = [each for held, _ in kinds for each in held]  # their memory is read
        self._functions = functions
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

    def changed(self) -> list[Any]:
        """Those that have."""
        now, known = self._memory.take(self._words), np.frombuffer(self._known, np.uint64)
        return [self._held[number] for number in np.flatnonzero(now != known)]

    def accept(self) -> None:
        """Take them as they are now."""
        # Held, so that nothing else comes to lie where one of them was.
        self._parts = [(each.__code__, each.__defaults__, each.__kwdefaults__) for each in self._functions]
        self._known = self._memory.take(self._words).tobytes()


def class_dict(cls: type) -> dict[str, Any]:
    """The dictionary of a class itself, of which ``vars`` gives a view that has no version."""
    (found,) = (each for each in gc.get_referents(vars(cls)) if isinstance(each, dict))
    return found
