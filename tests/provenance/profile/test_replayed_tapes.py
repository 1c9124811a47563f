"""What a trace knows of tapes: those that ran in it, as they were when they ran."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterator

import pytest
import torch

import piecegraph
from piecegraph.base.origin import GraphNode, GraphRecord, LaunchCall
from piecegraph.tape.tape import GraphStep, Inside, Tape, announced_steps


class _Nodes:
    """Of a graph that does nothing."""

    def __init__(self) -> None:
        self.off: set[int] = set()
        self.num_described = 0

    def describe(self) -> tuple[GraphNode, ...]:
        self.num_described += 1
        return (GraphNode("kernel", "k", None, None, None),)

    def switch(self, index: int, *, on: bool) -> None:
        (self.off.discard if on else self.off.add)(index)


def make_tape() -> tuple[Tape, _Nodes]:
    nodes = _Nodes()
    inside = Inside(nodes, lambda seen: GraphRecord("piece 0", "8", (LaunchCall("aten::mm"),), tuple(seen)))
    step = GraphStep("piece 0", lambda: None, inside)
    return Tape([step], [], [], {}, phase="8", check_always=False), nodes


def test_only_tapes_that_ran_are_seen() -> None:
    ran, _ = make_tape()
    idle, _ = make_tape()
    with announced_steps() as seen:
        ran.run()
        ran.run()
        recorded_inside, _ = make_tape()
        recorded_inside.run()
    assert list(seen.tapes) == [ran, recorded_inside]
    assert idle not in seen.tapes


def test_a_tape_that_goes_while_it_is_watched_is_kept_until_the_end() -> None:
    tape, _ = make_tape()
    number, alive = tape.number, weakref.ref(tape)
    with announced_steps() as seen:
        tape.run()
        del tape
        gc.collect()
    assert [kept.number for kept in seen.tapes] == [number]
    del seen
    gc.collect()
    assert alive() is None


def test_nodes_are_off_as_of_the_replay() -> None:
    tape, nodes = make_tape()
    with announced_steps() as seen:
        nodes.switch(0, on=False)
        tape.run()
        nodes.switch(0, on=True)
        tape.run()
    assert list(seen.left_out.values()) == [frozenset({0})]


def test_tapes_fall_silent_after_an_error() -> None:
    tape, _ = make_tape()
    tape.run()
    quiet = tape.run

    def fail_inside() -> None:
        with announced_steps():
            assert tape.run != quiet
            raise ValueError("of the user's")

    with pytest.raises(ValueError, match="of the user's"):
        fail_inside()
    assert tape.run == quiet


def test_other_threads_may_record_meanwhile() -> None:
    kept, failures = deque[Tape](maxlen=32), []  # all of them are told each time
    is_over = threading.Event()

    def record() -> None:
        try:
            while not is_over.is_set():
                kept.append(make_tape()[0])
                kept[-1].run()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(300):
            with announced_steps():
                pass
    finally:
        is_over.set()
        thread.join()
    assert not failures
    assert all(tape.run in (tape._replay, tape._checked_replay) for tape in kept)


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    with torch.no_grad():
        yield torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())


def test_a_model_that_is_closed_inside_a_trace_leaves_its_rows(model: torch.nn.Module) -> None:
    options = {"provenance": True, "graph_device": "simulated"}
    with piecegraph.trace() as taken:
        fast = piecegraph.compile(model, backend="eager", dynamic_dims={"input": 0}, options=options)
        fast(torch.ones(2, 4))
        fast.close()
        del fast
        gc.collect()
    assert any(launch.phase == "2" for launch in taken.launches)
