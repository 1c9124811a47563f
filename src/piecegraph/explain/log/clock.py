"""When a line was written, as the time in front of it says: which of two failures came first, in logs without an order.

Many formats name no year and none a zone, so times are only compared with each other, and not across half a year.
"""

from __future__ import annotations

import calendar
import itertools
import re
from collections.abc import Iterable

_TIME = re.compile(
    r"(?<!\d)(?:(?:\d{4}-)?(?P<month>[01]\d)-(?P<day>[0-3]\d)[ T_]"
    r"|[DIWEF](?P<glog_month>[01]\d)(?P<glog_day>[0-3]\d)[ ])"
    r"(?P<hour>[0-2]\d):(?P<minute>[0-5]\d):(?P<second>[0-6]\d)"
)
_REACH = 120
"""A time further inside of a line is a part of what it says."""
_NUM_ABOVE = 30
_DAYS_BEFORE = tuple(itertools.accumulate((0, *(calendar.monthrange(1972, month)[1] for month in range(1, 13)))))


def seconds_of(text: str) -> int | None:
    """The seconds since the beginning of the year, if the line begins with a time.

    >>> seconds_of("[rank1]: 2026-01-02 00:00:10,512 ERROR"), seconds_of("E0101 00:01:00.5 a.py:3]")
    (86410, 60)
    """
    found = _TIME.search(text, 0, _REACH)
    if found is None:
        return None
    month, day = int(found["month"] or found["glog_month"]), int(found["day"] or found["glog_day"])
    if not 1 <= month <= 12:
        return None
    days = _DAYS_BEFORE[month - 1] + day - 1
    return ((days * 24 + int(found["hour"])) * 60 + int(found["minute"])) * 60 + int(found["second"])


def latest_seconds(lines: list[str], end: int) -> int | None:
    """The time of the last line before this place that has one, if it is near."""
    above = range(end, max(-1, end - _NUM_ABOVE), -1)
    return next((seconds for at in above if (seconds := seconds_of(lines[at])) is not None), None)


def are_comparable(seconds: Iterable[int | None]) -> bool:
    """Whether all are known and say what came first; around the end of a year, or where clocks differ, they do not."""
    known = list(seconds)
    times = [one for one in known if one is not None]
    return len(times) == len(known) and bool(times) and max(times) - min(times) < 183 * 86400
