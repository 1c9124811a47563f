"""Nested values are taken apart and put together again."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from piecegraph.base.structure import atoms, flatten, map_arguments

leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = dataclasses.field(default=None, init=False)


def rebuild(value: Any) -> Any:
    found, _, structure = flatten(value)
    return structure.build(iter(found))


@given(nested)
def test_building_what_was_flattened_gives_it_back(value: Any) -> None:
    again = rebuild(value)
    assert again == value
    assert type(again) is type(value)


@given(nested, nested)
def test_structures_are_equal_only_if_the_containers_are(first: Any, second: Any) -> None:
    one, _, first_structure = flatten(first)
    two, _, second_structure = flatten(second)
    if first_structure == second_structure:
        assert len(one) == len(two)
        assert type(first_structure.build(iter(two))) is type(second) or first_structure.is_leaf


def test_kinds_of_containers() -> None:
    default = collections.defaultdict(list, a=1)
    for value in (Point(1, (2, 3)), Frozen({"k": 1}), default, torch.Size([2, 3]), (), {}, []):
        assert rebuild(value) == value
        assert type(rebuild(value)) is type(value)
    assert rebuild(default).default_factory is list


def test_model_output() -> None:
    output = BaseModelOutput(last_hidden_state=torch.ones(2), hidden_states=(torch.zeros(1),))
    again = rebuild(output)
    assert type(again) is BaseModelOutput
    assert again.last_hidden_state is output.last_hidden_state
    assert again.attentions is None


def test_return_types_of_torch() -> None:
    pair = torch.max(torch.eye(2), 1)
    assert type(rebuild(pair)) is type(pair)


def test_paths_are_readable() -> None:
    _, paths, _ = flatten({"a": [Point(1, 2)], "b": Frozen(3)}, "batch")
    assert paths == ["batch.a[0].x", "batch.a[0].y", "batch.b.a", "batch.b.b"]


def test_atoms_of_op_arguments() -> None:
    value = (1, [2, {"k": slice(3, None, 4)}])
    assert atoms(value) == [1, 2, 3, None, 4]
    assert map_arguments(value, lambda atom: atom) == value


class Tagged(collections.OrderedDict[str, Any]):
    pass


def test_attributes_beside_the_items_are_parts_too() -> None:
    value = Tagged(a=1)
    value.tag, value.mask = "x", torch.ones(2)  # type: ignore[attr-defined]
    found, paths, structure = flatten(value, "batch")
    assert found == [1, "x", value.mask]  # type: ignore[attr-defined]
    assert paths == ["batch.a", "batch.tag", "batch.mask"]
    again = structure.build(iter([2, "y", None]))
    assert (again, vars(again)) == (Tagged(a=2), {"tag": "y", "mask": None})
    assert flatten(Tagged(a=1))[2] != structure


def test_what_makes_missing_items_is_part_of_the_structure() -> None:
    assert flatten(collections.defaultdict(list))[2] == flatten(collections.defaultdict(list))[2]
    assert flatten(collections.defaultdict(list))[2] != flatten(collections.defaultdict(dict))[2]


class Tripled(dict[str, Any]):
    """Shows values that it does not hold, and changes those that it is given."""

    def values(self) -> Any:
        return [3 * value for value in super().values()]

    def __getitem__(self, key: str) -> Any:
        return 3 * super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value + 1)


class TripledInOrder(collections.OrderedDict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return 3 * super().__getitem__(key)

    def update(self, *given: Any, **more: Any) -> None:
        raise AssertionError("the methods of a subclass are not asked")


class Sized(list[Any]):
    def __init__(self, size: int, value: Any) -> None:
        super().__init__([value] * size)

    def __iter__(self) -> Any:
        return (3 * value for value in super().__iter__())

    def __len__(self) -> int:
        return 7


class Shifted(collections.namedtuple("Shifted", ["first", "second"])):
    __slots__ = ()

    def __new__(cls, first: int, second: int = 5) -> Shifted:
        return super().__new__(cls, first + 1, second + 1)


def test_containers_are_taken_apart_past_methods_of_their_own() -> None:
    in_order = TripledInOrder()
    collections.OrderedDict.__setitem__(in_order, "b", 1)
    collections.OrderedDict.__setitem__(in_order, "a", 2)
    in_order.move_to_end("b")
    for value, held, kind in (
        (Tripled({"a": 1, "b": 2}), [1, 2], dict),
        (in_order, [2, 1], collections.OrderedDict),
        (Sized(2, 4), [4, 4], list),
        (Shifted(1), [2, 6], tuple),
    ):
        found, _, structure = flatten(value)
        assert found == held
        built = structure.build(iter(found))
        assert type(built) is type(value)
        assert kind.__repr__(built) == kind.__repr__(value)


@dataclasses.dataclass
class Doubled:
    a: Any

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        return 2 * found if name == "a" else found


def test_a_dataclass_is_taken_apart_past_how_it_shows_its_fields() -> None:
    found, _, structure = flatten(Doubled(4))
    assert found == [4]
    assert structure.build(iter(found)).a == 8
