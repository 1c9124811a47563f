"""Whether something goes as soon as nobody holds it any more, without the help of a garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_collector() -> Iterator[None]:
    """Inside, what lies in a circle stays. What lay in one before is gone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Held:
    """Looks, without holding them, whether objects are still there."""

    def __init__(self, objects: Mapping[str, Any], **lists: Iterable[Any]) -> None:
        listed = [(name, each) for name, found in lists.items() for each in found]
        self._names = [(name, weakref.ref(each)) for name, each in [*objects.items(), *listed]]

    def left(self) -> set[str]:
        """The names of those that are."""
        return {name for name, reference in self._names if reference() is not None}
