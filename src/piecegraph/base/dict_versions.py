"""Whether dictionaries have changed since they were last looked at, without a look at what is in them.

CPython gives every change of a dictionary a number that no other has: its ``ma_version_tag``, which lies behind the
head of the object and its length. Python 3.11 and 3.12 have it. The numbers of hundreds of dictionaries are gathered
from memory at once, in a microsecond or two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

_OFFSET = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)
_WORD = ctypes.sizeof(ctypes.c_uint64)


class DictVersions:
    """Dictionaries, and how often each has changed."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list({id(each): each for each in dicts}.values()) or [{}]  # held: their memory is read
        places = np.array([id(each) + _OFFSET for each in self._dicts])
        first = int(places.min())
        self._words = (places - first) // _WORD
        span = (ctypes.c_uint64 * (int(self._words.max()) + 1)).from_address(first)
        self._memory = np.frombuffer(memoryview(span), np.uint64)
        """From the first to the last of them. What lies between them is never read."""
        self.accept()

    def are_known(self) -> bool:
        """Whether none has changed since it was accepted."""
        return bool(self._memory.take(self._words).tobytes() == self._known)

    def accept(self) -> None:
        """Take them as they are now."""
        self._known = self._memory.take(self._words).tobytes()
