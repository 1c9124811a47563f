"""Which sizes are recorded and which one serves a call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from piecegraph.base.plan import SizeKey
from piecegraph.tape.buckets import best_fit, ladder, next_rung

sizes = st.integers(1, 6000)
keys = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)).map(SizeKey), max_size=12)


@given(sizes)
def test_a_ladder_rises_and_ends_where_it_was_told_to(largest: int) -> None:
    rungs = ladder(largest)
    assert rungs == sorted(set(rungs))
    assert rungs[-1] == largest
    assert rungs[0] == 1 or largest == 1


@given(sizes)
def test_little_is_padded(size: int) -> None:
    rung = next_rung(size)
    assert rung >= size
    assert rung < 2 * size
    if size > 64:
        assert rung - size < size / 4


@given(st.integers(2, 6000))
def test_a_rung_is_its_own_rung(size: int) -> None:
    assert next_rung(next_rung(size)) == next_rung(size)


@given(st.tuples(st.integers(1, 40), st.integers(1, 40)), keys, st.tuples(st.booleans(), st.booleans()))
def test_the_best_fit_covers_obeys_and_is_smallest(
    wanted: tuple[int, int], recorded: list[SizeKey], pad: tuple[bool, bool]
) -> None:
    def fits(key: SizeKey) -> bool:
        pairs = zip(key.values, wanted, pad, strict=True)
        return all(have == want or (may and have > want) for have, want, may in pairs)

    found = best_fit(SizeKey(wanted), recorded, pad)
    fitting = [key for key in recorded if fits(key)]
    if found is None:
        assert not fitting
    else:
        assert fits(found)
        assert all(found.volume <= key.volume for key in fitting)


def test_static_functions_have_one_size() -> None:
    assert best_fit(SizeKey(()), [SizeKey(())], []) == SizeKey(())
