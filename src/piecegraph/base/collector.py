"""Python's cyclic garbage collector, kept out of starts, captures and service."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_MANY = 100_000
"""New objects through which the collector goes in some forty milliseconds, as long as it takes to count millions."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, nothing is collected but what nobody refers to.

    A start makes millions of objects that stay. The collector looks at all of them every time their number has grown
    by a quarter, and finds next to nothing: a third of the time of a warm start.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():  # it counts what is frozen one by one
            # What was made is old at once: otherwise the collector would look through it as soon as it is back.
            # Where somebody has frozen objects, they would not be any more.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Inside, the collector does not run by itself, and finds nothing if somebody asks for it.

    Where somebody has frozen objects already, they stay so, and no others become so for good: who asks for a collection
    then gets one.
    """
    was_enabled, is_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    if not is_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not is_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


class _Frozen:
    """Whether :func:`freeze_all` was called in this process."""

    by_us = False


def freeze_all() -> None:
    """Have the collector never look at what there is by now, as a server does that has loaded its models.

    They are a million objects, and to look through all of them takes a second in which no request is served.
    """
    gc.collect()
    gc.freeze()
    _Frozen.by_us = True


def collect_all() -> None:
    """Collect what :func:`freeze_all` has frozen, too. What others have frozen is theirs."""
    if not _Frozen.by_us:
        gc.collect()
        return
    gc.unfreeze()
    freeze_all()
