"""What the code changes in Python is noticed where it runs as it is: no replay would do it again."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import io
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import piecegraph
from piecegraph.engine.python_state import PythonState
from piecegraph.errors import TraceError


def compile_as_it_is(model: Any) -> Any:
    return piecegraph.compile(model, frontend="breakable", on_fallback="raise", options={"graph_device": "simulated"})


class Part:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Stateful(nn.Module):
    def __init__(self, change: Callable[[Stateful, Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.change = change
        self.calls = 0
        self.log: list[Any] = []
        self.table: dict[str, Any] = {"deep": {"er": set()}}
        self.part = Part()
        self.array = np.zeros(2)
        self.loose = torch.zeros(2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return x + 1


def count(module: Stateful, x: Tensor) -> None:
    module.calls += 1


def replace(module: Stateful, x: Tensor) -> None:
    module.mean = module.mean + x.mean(0)


def write_attribute_of_part(module: Stateful, x: Tensor) -> None:
    module.part.value += 1


def write_array(module: Stateful, x: Tensor) -> None:
    module.array[0] += 1


CHANGES: dict[str, tuple[Callable[[Stateful, Tensor], Any], str]] = {
    "a number": (count, r"self\.calls"),
    "a list": (lambda module, x: module.log.append(1), r"self\.log\[0\]"),
    "a list of results": (lambda module, x: module.log.append(x), r"self\.log\[0\]"),
    "deep inside": (lambda module, x: module.table["deep"]["er"].add(len(module.table["deep"]["er"])), r"table\.deep"),
    "an attribute of a part": (write_attribute_of_part, r"part\.value"),
    "a buffer that is replaced": (replace, r"_buffers\.mean"),
    "a weight's data": (lambda module, x: setattr(module.inner.weight, "data", torch.ones(2, 2)), "weight"),
    "an array": (write_array, r"array\.data"),
    "random numbers of Python": (lambda module, x: random.random(), "the state of random"),
    "random numbers of numpy": (lambda module, x: np.random.rand(), r"numpy\.random"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused_and_undone(name: str) -> None:
    change, shown = CHANGES[name]
    model = Stateful(change)
    with torch.no_grad(), pytest.raises(TraceError, match=f"PG202.*{shown}"):
        compile_as_it_is(model)(torch.ones(3, 2))
    assert (model.calls, model.log, model.table, model.part.value) == (0, [], {"deep": {"er": set()}}, 0)


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "bytes": (bytearray, lambda held: held.append(1), bytes, "data"),
    "an array of Python's": (
        lambda: array.array("d", [0.0]),
        lambda held: held.append(1.0),
        lambda held: held.tolist(),
        "data",
    ),
    "a value of C": (
        lambda: ctypes.c_double(0),
        lambda held: setattr(held, "value", held.value + 1),
        lambda held: held.value,
        "data",
    ),
    "memory": (lambda: memoryview(bytearray(2)), lambda held: held.__setitem__(1, held[1] + 1), bytes, "data"),
    "an array": (lambda: np.zeros(2), lambda held: held.__iadd__(1), lambda held: held.tolist(), "data"),
    "a text": (io.StringIO, lambda held: held.write("a"), lambda held: (held.getvalue(), held.tell()), "text"),
    "an attribute of a tensor": (
        lambda: torch.zeros(2),
        lambda held: setattr(held, "calls", getattr(held, "calls", 0) + 1),
        lambda held: vars(held),
        "calls",
    ),
    "what a tensor requires": (
        lambda: torch.zeros(2),
        lambda held: held.requires_grad_(not held.requires_grad),
        lambda held: held.requires_grad,
        "requires_grad",
    ),
    "the environment": (
        lambda: os.environ,
        lambda held: held.update(PIECEGRAPH_TESTS=held.get("PIECEGRAPH_TESTS", "") + "1"),
        lambda held: held.get("PIECEGRAPH_TESTS"),
        "environ",
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_a_change_without_attributes_is_refused_and_undone(name: str) -> None:
    make, change, read, shown = HELD[name]
    held, before = make(), read(make())

    def function(x: Tensor) -> Tensor:
        change(held)
        return x + 1

    with torch.no_grad(), pytest.raises(TraceError, match=f"PG202.*{shown}"):
        compile_as_it_is(function)(torch.ones(3, 2))
    assert read(held) == before


def test_an_attribute_that_is_set_on_an_argument() -> None:
    def function(x: Tensor) -> Tensor:
        x.seen = True  # type: ignore[attr-defined]
        return x + 1

    with torch.no_grad(), pytest.raises(TraceError, match=r"PG202.*x\.seen"):
        compile_as_it_is(function)(torch.ones(2))


def test_an_argument_that_is_filled() -> None:
    def function(features: dict[str, Tensor]) -> Tensor:
        features["doubled"] = features["x"] * 2
        return features["doubled"] + 1

    with torch.no_grad(), pytest.raises(TraceError, match=r"PG202.*features\.doubled"):
        compile_as_it_is(function)({"x": torch.ones(2)})


def test_what_is_kept_once_for_later_is_fine() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(4.0)
            return x + self.table

    model = Caches()
    fast = compile_as_it_is(model)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4)
            torch.testing.assert_close(fast(x), x + torch.arange(4.0))
    assert fast.stats()["coverage"] == 1.0


def test_but_not_if_the_first_result_is_another_one() -> None:
    class First(nn.Module):
        is_first = True

        def forward(self, x: Tensor) -> Tensor:
            was_first, self.is_first = self.is_first, False
            return x + 1 if was_first else x - 1

    with torch.no_grad(), pytest.raises(TraceError, match="PG202.*is_first"):
        compile_as_it_is(First())(torch.ones(2))


seen: list[int] = []


@piecegraph.eager_op
def notes(x: Tensor) -> Tensor:
    seen.append(len(seen))
    return x * 2


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return noted(self, x + 1) + 1


@piecegraph.eager_op
def noted(module: Any, x: Tensor) -> Tensor:
    module.seen.append(len(module.seen))
    return x * 2


def test_what_an_eager_op_changes_it_changes_at_every_replay() -> None:
    model = Notes()
    fast = compile_as_it_is(model)
    with torch.no_grad():
        fast(torch.ones(2))
        before = len(model.seen)
        fast(torch.ones(2))
    assert len(model.seen) == before + 1


def test_what_an_eager_op_changes_and_recorded_code_reads() -> None:
    def function(x: Tensor) -> Tensor:
        return notes(x + 1) + len(seen)

    with torch.no_grad(), pytest.raises(TraceError, match="PG202.*an eager op changes len.seen.*may read"):
        compile_as_it_is(function)(torch.ones(2))


def test_what_is_kept_for_each_size_is_not_said_to_be_changed_by_an_eager_op() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if len(x) not in self.tables:
                self.tables[len(x)] = torch.arange(len(x)).cos()
            return x * self.tables[len(x)]

    model = Tables()
    fast = compile_as_it_is(model)
    with torch.no_grad():
        fast(torch.ones(2))
        with pytest.raises(TraceError, match="PG202 the function changes Python state: self.tables"):
            fast(torch.ones(3))
    assert list(model.tables) == [2]


def test_tensors_outside_of_the_module_are_written_to_once_for_each_call() -> None:
    total = torch.zeros(2)

    def function(x: Tensor) -> Tensor:
        total.add_(x)
        return total * 2

    fast = compile_as_it_is(function)
    with torch.no_grad():
        for number in range(1, 4):
            assert fast(torch.ones(2)).tolist() == [2.0 * number] * 2
    assert total.tolist() == [3, 3]


def test_walking_ends() -> None:
    knot: list[Any] = []
    knot.append(knot)
    state = PythonState({"knot": knot, "nothing": None})
    assert state.change() is None
    knot.append(1)
    assert state.change() == "knot[1]"


# --- what is reached through other code


def counting() -> tuple[Callable[[Tensor], Tensor], list[int]]:
    numbers = [0]

    def bump() -> int:
        numbers[0] += 1
        return numbers[0]

    return lambda x: x * bump(), numbers


@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_a_counter_of_a_function_that_is_named(frontend: Any) -> None:
    function, numbers = counting()
    fast = piecegraph.compile(function, frontend=frontend, backend="eager", options={"graph_device": "simulated"})
    with torch.no_grad(), pytest.raises(TraceError, match="PG202"):
        fast(torch.ones(2))
    assert numbers == [0]


def test_a_hook_of_a_submodule() -> None:
    model, noted_sums = nn.Sequential(nn.Identity()), list[float]()
    model[0].register_forward_hook(lambda module, args, result: noted_sums.append(result.sum().item()))
    with torch.no_grad(), pytest.raises(TraceError, match=r"PG202.*noted_sums\[0\]"):
        compile_as_it_is(model)(torch.ones(2))
    assert not noted_sums


total_calls = 0


def test_a_global_that_is_another_number() -> None:
    def function(x: Tensor) -> Tensor:
        return x * count_globally()

    with torch.no_grad(), pytest.raises(TraceError, match="PG202.*total_calls"):
        compile_as_it_is(function)(torch.ones(2))
    assert total_calls == 0


def count_globally() -> int:
    global total_calls
    total_calls += 1
    return total_calls


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls

    def method(self, x: Tensor) -> Tensor:
        return self(x)


@pytest.mark.parametrize("pick", [lambda counts: counts, lambda counts: counts.method, functools.partial])
def test_the_object_that_is_called(pick: Callable[[Counts], Any]) -> None:
    counts = Counts()
    with torch.no_grad(), pytest.raises(TraceError, match=r"PG202.*calls"):
        compile_as_it_is(pick(counts))(torch.ones(2))
    assert counts.calls == 0


def forever() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def spent(source: Iterator[int]) -> Iterator[int]:
    list(itertools.islice(source, 4))
    return source


@pytest.mark.parametrize(
    "make", [itertools.count, forever, lambda: iter([0, 1, 2, 3]), lambda: spent(itertools.cycle([0, 1, 2]))]
)
def test_an_iterator_goes_on(make: Callable[[], Iterator[int]]) -> None:
    source = make()
    with torch.no_grad(), pytest.raises(TraceError, match="PG202.*source"):
        compile_as_it_is(lambda x: x * next(source))(torch.ones(2))


@pytest.mark.parametrize("make", [itertools.count, forever, lambda: spent(itertools.cycle([0, 1, 2]))])
def test_an_iterator_that_stays_where_it_is(make: Callable[[], Iterator[int]]) -> None:
    source = make()
    assert PythonState({"source": source}).change() is None


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng, np.random.RandomState])
def test_a_generator_of_random_numbers_is_put_back(make: Callable[[int], Any]) -> None:
    source, draw = make(3), make(3).random
    with torch.no_grad(), pytest.raises(TraceError, match=r"PG202.*source\.state"):
        compile_as_it_is(lambda x: x * source.random())(torch.ones(2))
    assert source.random() == draw()
    drawing = make(3).random
    with torch.no_grad(), pytest.raises(TraceError, match=r"PG202.*state"):
        compile_as_it_is(lambda x: x * drawing())(torch.ones(2))
    assert drawing() == make(3).random()


def test_code_that_is_named_and_changes_nothing() -> None:
    source, generator = itertools.count(), random.Random(3)
    model = nn.Sequential(nn.Identity())
    model[0].register_forward_hook(lambda module, args, result: result * (1 if source and generator else 0))
    fast = compile_as_it_is(model)
    with torch.no_grad():
        for number in range(3):
            assert fast(torch.full((2,), float(number))).tolist() == [number] * 2
    assert fast.stats()["coverage"] == 1.0


class Tally:
    number = 0


def adds_to_a_set(seen: set[int] = set()) -> int:  # noqa: B006 - it is what is tried
    seen.add(len(seen))
    return len(seen)


def counts_on(numbers: Iterator[int] = itertools.count(1)) -> int:  # noqa: B008 - it is what is tried
    return next(numbers)


def counts_in_a_class() -> int:
    Tally.number += 1
    return Tally.number


def counts_in_itself() -> int:
    counts_in_itself.number += 1  # type: ignore[attr-defined]
    return counts_in_itself.number  # type: ignore[attr-defined,no-any-return]


counts_in_itself.number = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [adds_to_a_set, counts_on, counts_in_a_class, counts_in_itself])
@pytest.mark.parametrize("frontend", ["auto", "breakable"])
def test_what_no_tracer_tells_of_is_refused(count: Callable[[], int], frontend: Any) -> None:
    def function(x: Tensor) -> Tensor:
        return x + count()

    options = {"graph_device": "simulated", "cache": False}
    with torch.no_grad(), pytest.raises(TraceError, match="PG202 the function changes Python state"):
        piecegraph.compile(function, frontend=frontend, backend="eager", options=options)(torch.zeros(2))
    if count is not counts_on:  # no iterator can be put back
        assert count() == 1
    Tally.number = counts_in_itself.number = 0  # type: ignore[attr-defined]
    adds_to_a_set.__defaults__[0].clear()  # type: ignore[index]


class Makes(collections.OrderedDict[str, Any]):
    """As the table of activations of transformers does."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


class Keeps(dict[str, Any]):
    """Keeps books of who asked, and writes down what it is given in its own way."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: list[str] = []

    def items(self) -> Any:
        self.asked.append("items")
        return super().items()

    def __iter__(self) -> Iterator[str]:
        self.asked.append("iter")
        return super().__iter__()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, [value])


class Doubles(list[int]):
    """Shows every number twice as large."""

    def __iter__(self) -> Iterator[int]:
        return (2 * number for number in super().__iter__())

    def extend(self, numbers: Iterable[int]) -> None:
        super().extend(number + 1 for number in numbers)


def test_containers_with_methods_of_their_own_stay_as_they_are() -> None:
    """What is in them is looked at, and put back, past these methods: tables may make what they give."""
    model = nn.Linear(2, 2)
    model.makes, model.keeps, model.doubles = Makes(a=list), Keeps({"a": 1}), Doubles([3, 4])
    state = PythonState({"model": model})
    assert state.change() is None
    model.keeps["b"] = 2
    dict.__setitem__(model.keeps, "a", 5)
    model.doubles.append(5)
    model.makes["b"] = set
    assert state.change() is not None
    state.restore()
    assert list(collections.OrderedDict.items(model.makes)) == [("a", list)]
    assert dict.__repr__(model.keeps) == "{'a': 1}"
    assert list.__repr__(model.doubles) == "[3, 4]"
    assert model.keeps.asked == []


@pytest.mark.parametrize("frontend", ["trace", "breakable"])
def test_a_table_that_makes_what_it_gives(frontend: str) -> None:
    table = Makes(relu=nn.ReLU)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = table["relu"](x - 1)
            return result

    fast = piecegraph.compile(Model(), frontend=frontend, backend="eager", options={"graph_device": "simulated"})
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 2)
            assert torch.equal(fast(x), torch.relu(x - 1))
    assert dict.__getitem__(table, "relu") is nn.ReLU
