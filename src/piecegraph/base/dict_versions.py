"""Whether dictionaries have changed since they were last looked at, without a look at what is in them.

CPython gives every change of a dictionary a number that no other has: its ``ma_version_tag``, which lies behind the
head of the object and its length. Python 3.11 and 3.12 have it; :data:`ARE_THERE` says whether this one does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

_OFFSET = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)
_Version = ctypes.c_char * ctypes.sizeof(ctypes.c_uint64)


class DictVersions:
    """Dictionaries, and how often each has changed."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = list({id(each): each for each in dicts}.values())  # held: their memory is read
        self._cells = [_Version.from_address(id(each) + _OFFSET) for each in self._dicts]
        self._known = b""
        self.accept()

    def are_known(self) -> bool:
        """Whether none has changed since it was accepted."""
        return b"".join(self._cells) == self._known

    def accept(self) -> None:
        """Take them as they are now."""
        self._known = b"".join(self._cells)


class _Probe:
    attribute: object


def _are_there() -> bool:
    """Whether changes show, by whichever way they are made; attributes are set by another when a line is hot."""
    probe = _Probe()
    probe.attribute = 0
    versions = DictVersions([vars(probe)])
    for number in range(1, 65):  # what is set to what it was has not changed
        if not versions.are_known():
            return False
        if number % 4:
            probe.attribute = number
        elif number % 8:
            vars(probe)["attribute"] = number
        else:
            probe.__dict__.update(attribute=number)
        if versions.are_known():
            return False
        versions.accept()
    del probe.attribute
    return not versions.are_known()


ARE_THERE = _are_there()
