"""Values that occur many times in a profile, kept once and meant by their number."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value", bound=Hashable)


class Interned(Generic[Value]):
    """Numbers for values, the same for equal ones."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}

    def number(self, value: Value) -> int:
        known = self._numbers.get(value)
        if known is None:
            known = self._numbers[value] = len(self.values)
            self.values.append(value)
        return known
