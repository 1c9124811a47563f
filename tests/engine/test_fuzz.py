"""Random programs do the same plain and compiled; and a fault would be found, made smaller and written down."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest

import piecegraph
from piecegraph.engine import plan_cache, planner
from piecegraph.graph.kept_trace import load_trace
from tests.cases.forked import ForkServer
from tests.fuzzing.campaign import Fault, fuzz
from tests.fuzzing.programs import Program

PROGRAM = Program(
    parameters=("x: Tensor", "k=2"),
    body=("v0 = x.sum(0)", "v1 = x * k", "v2 = v1 + 1"),
    results=("v0", "v2"),
    shape="{{'a': {0}, 'b': [{1}]}}",
    schedule=("x0 = values(1, 3, 4)", "r0 = run(x0)", "run.poke(r0)", "x1 = values(2, 3, 4)", "r1 = run(x1)"),
    arguments=(("capture_sizes", "[8]"),),
    mode="no_grad",
    door="compile",
    is_function=True,
)


@pytest.mark.parametrize("seed_number", range(4))
def test_random_programs_do_the_same_compiled(seed_number: int) -> None:
    summary = fuzz(seed_number, 20)
    assert summary.num_programs == 20
    assert not summary.titles, "\n\n".join(fault.program.source + str(fault.verdict) for fault in summary.faults)
    assert summary.num_replayed > 40
    assert summary.num_warm > 5
    assert summary.verdicts["same"] > 40


def forgetful(model: Any, **arguments: Any) -> Any:
    """Compiles so that every call gives the first call's result."""
    fast = piecegraph.api.compile(model, **arguments)
    first: list[Any] = []
    engine, serve = fast._engine, fast._engine._serve

    def remember(args: Any, kwargs: Any) -> Any:
        first.append(serve(args, kwargs))
        return first[0]

    engine._serve = remember
    return fast


def test_a_fault_is_found_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecegraph, "compile", forgetful, raising=False)
    variant = "trace, direct"
    found = PROGRAM.case().judge(backend="eager")
    assert (found.kind, found.label) == ("different", "call 1: result a")
    program = Fault(PROGRAM, variant, found).smaller(max_seconds=30).program
    assert len(program.body) <= 1
    assert (program.shape, program.arguments) == ("{0}", ())


def test_a_plan_that_is_wrong_once_it_was_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_another(*args: Any) -> Any:
        traced = load_trace(*args)
        for node in traced.graph.find_nodes(op="call_function", target=operator.mul):
            node.target = operator.sub
        return traced

    monkeypatch.setattr(plan_cache, "load_trace", load_another)
    monkeypatch.setattr(planner, "check_trace", lambda *args: None)  # which would have it made anew
    found = PROGRAM.case().judge(is_kept=True, backend="eager")
    assert (found.kind, found.label, found.is_warm) == ("different", "kept: call 0: result b[0]", True)


def test_a_fault_becomes_a_script_that_runs_by_itself(forked: ForkServer, tmp_path: Path) -> None:
    fault = Fault(PROGRAM, "breakable, simulated", PROGRAM.case().judge(frontend="breakable"))
    (tmp_path / "fault.py").write_text(fault.script)
    ran = forked.run("fault.py", cwd=tmp_path)
    assert (ran.stdout.strip(), ran.returncode) == ("breakable, simulated: same", 0), ran.stderr


def test_the_script_runs_and_tells_what_it_found(forked: ForkServer, tmp_path: Path) -> None:
    script = str(Path(__file__).parents[2] / "scripts" / "fuzz.py")
    arguments = ["--minutes", "60", "--jobs", "2", "--rounds", "0", "--out", str(tmp_path)]
    ran = forked.run(script, *arguments, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "0 programs, 0 calls, 0 kept plans, 0 faults, 0 crashes" in ran.stdout
