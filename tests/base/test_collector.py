"""Python's garbage collector during a start."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from piecegraph.base import collector
from piecegraph.base.collector import collect_all, collector_off, collector_paused, freeze_all


@pytest.fixture
def _unfrozen() -> Iterator[None]:
    """The tests freeze what they import."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("_unfrozen")
def test_the_collector_goes_on_after_a_start_even_if_that_fails() -> None:
    def fail() -> None:
        with collector_paused():
            assert not gc.isenabled()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert gc.isenabled()


@pytest.mark.usefixtures("_unfrozen")
def test_what_was_made_is_not_looked_at_as_soon_as_the_collector_is_back() -> None:
    with collector_paused():
        made = [[number] for number in range(250_000)]
    assert any(each is made for each in gc.get_objects(generation=2))


def test_what_little_was_made_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask whether something is frozen takes as long as there is something."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("it was asked"))
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("_unfrozen")
def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_frozen_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collector_paused():
        made = [[number] for number in range(250_000)]
    assert made
    assert gc.get_freeze_count() >= frozen > 0


@pytest.mark.usefixtures("_unfrozen")
def test_nothing_is_collected_in_a_capture_and_everything_is_afterwards() -> None:
    found = Cycle()
    alive = weakref.ref(found)
    del found
    with collector_off():
        gc.collect()
        assert alive() is not None
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.collect()
    assert alive() is None


def test_what_was_frozen_before_a_capture_is_frozen_behind_it() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with collector_off():
        pass
    assert gc.get_freeze_count() > 0.9 * count > 0  # some end meanwhile, by themselves


def test_a_model_that_is_given_up_goes_even_if_it_was_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector._Frozen, "by_us", False)  # it is set here, and not for other tests
    found = Cycle()
    alive = weakref.ref(found)
    freeze_all()
    del found
    gc.collect()
    assert alive() is not None
    collect_all()
    assert alive() is None
    assert gc.get_freeze_count() > 0


def test_what_others_have_frozen_is_theirs() -> None:
    found = Cycle()
    alive = weakref.ref(found)
    gc.freeze()
    count = gc.get_freeze_count()
    del found
    collect_all()
    assert alive() is not None
    assert gc.get_freeze_count() > count // 2, "it falls to nothing, or by what dies without a collector"


class Cycle:
    def __init__(self) -> None:
        self.itself = self
