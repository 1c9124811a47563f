"""Which sizes are recorded, and which recorded size serves a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from piecegraph.base.plan import SizeKey

_FIRST = [1, 2, 4]
_LADDER = ((64, 8), (256, 16), (512, 32), (1024, 64), (2048, 128), (4096, 256))
"""(up to, step): dense where a size is cheap to record and padding is dear, coarser later."""
_LAST_STEP = 512


def ladder(largest: int) -> list[int]:
    """The sizes of ``capture_sizes="auto"``, smallest first. Above 64 a call is padded by less than an eighth.

    >>> ladder(40)
    [1, 2, 4, 8, 16, 24, 32, 40]
    """
    sizes = list(_FIRST)
    for end, step in _LADDER:
        sizes += range(sizes[-1] // step * step + step, end + 1, step)
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + _LAST_STEP)
    kept = [size for size in sizes if size < largest]
    return [*kept, largest]


def next_rung(size: int) -> int:
    """The smallest size of the endless ladder that is not below ``size``."""
    return next(rung for rung in ladder(max(4096, size + _LAST_STEP)) if rung >= size)


def best_fit(wanted: SizeKey, recorded: Iterable[SizeKey], can_pad: Sequence[bool]) -> SizeKey | None:
    """The smallest recorded size that covers the wanted one, padding only the dimensions that may be padded.

    >>> best_fit(SizeKey((5,)), [SizeKey((4,)), SizeKey((8,)), SizeKey((16,))], [True])
    SizeKey(values=(8,))
    """
    fitting = [
        key
        for key in recorded
        if key.covers(wanted)
        and all(may or mine == theirs for may, mine, theirs in zip(can_pad, key.values, wanted.values, strict=True))
    ]
    return min(fitting, key=lambda key: (key.volume, key.values), default=None)
