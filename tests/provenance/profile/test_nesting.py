"""What is open at a moment, and whose time is whose: against looking at every range."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from piecegraph.provenance.profile.nesting import Moment, open_ranges, own_times
from piecegraph.provenance.profile.timeline import RANGE_KINDS, ThreadRanges

OP = RANGE_KINDS.index("op")

# Few distinct times, so that ranges touch, coincide and begin at the very moment of a launch.
TIMES = st.integers(0, 12)
RANGES = st.lists(st.tuples(TIMES, st.integers(0, 8), st.sampled_from(range(len(RANGE_KINDS)))), max_size=12)


def thread_of(ranges: list[tuple[int, int, int]]) -> ThreadRanges:
    thread = ThreadRanges(process="1", name="1")
    for start, duration, kind in ranges:
        thread.starts.append(start)
        thread.durations.append(duration)
        thread.kinds.append(kind)
    return thread


def from_outer_to_inner(ranges: list[tuple[int, int, int]]) -> list[int]:
    def order(index: int) -> tuple[int, int, int, int]:
        start, duration, kind = ranges[index]
        return start, -duration, kind, index

    return sorted(range(len(ranges)), key=order)


def is_open(start: int, duration: int, time: int) -> bool:
    return start <= time < start + duration or start == time


@given(ranges=RANGES, times=st.lists(TIMES, max_size=8))
def test_all_ranges_around_a_moment_are_found(ranges: list[tuple[int, int, int]], times: list[int]) -> None:
    moments = [Moment(number, time) for number, time in enumerate(times)]
    found = {number: list(opened) for number, opened in open_ranges(thread_of(ranges), moments)}
    order = from_outer_to_inner(ranges)
    assert found == {
        number: [index for index in order if is_open(*ranges[index][:2], time)] for number, time in enumerate(times)
    }


@given(ranges=RANGES, times=st.lists(TIMES, max_size=3))
def test_all_ranges_around_the_start_of_a_range_are_found(ranges: list[tuple[int, int, int]], times: list[int]) -> None:
    moments = [Moment(index, start, innermost=index) for index, (start, _, _) in enumerate(ranges)]
    others = [Moment(len(ranges) + number, time) for number, time in enumerate(times)]
    found = {number: list(opened) for number, opened in open_ranges(thread_of(ranges), others + moments)}
    order = from_outer_to_inner(ranges)
    for index, (start, _, _) in enumerate(ranges):
        outer = order[: order.index(index) + 1]
        assert found[index] == [one for one in outer if is_open(*ranges[one][:2], start)]


def nests(one: tuple[int, int], other: tuple[int, int]) -> bool:
    (a, b), (c, d) = one, other
    return b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


@given(spans=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 15)), max_size=12))
def test_every_moment_belongs_to_the_innermost_op(spans: list[tuple[int, int]]) -> None:
    nested: list[tuple[int, int]] = []
    for start, duration in spans:
        if all(nests((start, start + duration), (begin, begin + length)) for begin, length in nested):
            nested.append((start, duration))
    ranges = [(start, duration, OP) for start, duration in nested]
    order = from_outer_to_inner(ranges)
    owned = dict.fromkeys(range(len(ranges)), 0)
    for slot in range(50):
        around = [index for index in order if ranges[index][0] <= slot < ranges[index][0] + ranges[index][1]]
        if around:
            owned[around[-1]] += 1
    assert dict(own_times(thread_of(ranges))) == owned


def test_an_op_that_outlives_its_caller_takes_no_more_than_the_caller_has() -> None:
    assert dict(own_times(thread_of([(0, 10, OP), (4, 20, OP)]))) == {0: 4.0, 1: 20.0}
