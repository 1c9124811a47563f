"""That a change of a dictionary shows, however it is made, and nothing else does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from piecegraph.base.versions import Versions


class Thing:
    attribute: object = None


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "set": lambda each: each.__setitem__("a", object()),
    "add": lambda each: each.__setitem__("b", 1),
    "update": lambda each: each.update(a=object()),
    "delete": lambda each: each.__delitem__("a"),
    "pop": lambda each: each.pop("a"),
    "clear": lambda each: each.clear(),
}


@pytest.mark.parametrize("number", [0, 1, 7])
@pytest.mark.parametrize("make", [dict, OrderedDict])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_one_of_many_has_changed(change: Callable[[Any], Any], make: Callable[..., Any], number: int) -> None:
    dicts = [make(a=1) for _ in range(8)]
    versions = Versions(dicts)
    assert versions.are_known()
    change(dicts[number])
    assert not versions.are_known()
    versions.accept()
    assert versions.are_known()


def test_attributes_show_also_when_the_line_that_sets_them_is_hot() -> None:
    thing = Thing()
    versions = Versions([vars(thing)])
    for number in range(300):
        assert versions.are_known()
        thing.attribute = (number,)
        assert not versions.are_known()
        versions.accept()
    del thing.attribute
    assert not versions.are_known()


def test_reading_and_setting_to_the_same_are_no_changes() -> None:
    each = {"a": 1}
    versions = Versions([each, each])
    assert list(each.items()) == list(each.copy().items())
    each["a"] = each.setdefault("a", 2)
    assert versions.are_known()


def test_no_dictionaries_never_change() -> None:
    assert Versions([]).are_known()


def test_defaults_and_code_of_functions() -> None:
    def function(first: int = 1, *, second: int = 2) -> int:
        return first + second

    def other() -> None: ...

    versions = Versions([], [], [other, function])
    assert versions.are_known()
    for name, value in (("__defaults__", (5,)), ("__kwdefaults__", {"second": 3}), ("__code__", other.__code__)):
        setattr(function, name, value)
        assert versions.changed() == [function]
        versions.accept()
        assert versions.are_known()
