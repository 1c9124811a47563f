"""Runs many random programs, makes those that fail smaller, and writes each down as a script of its own."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzzing import judge
from tests.fuzzing.programs import Program, programs

logging.getLogger("torch").setLevel(logging.CRITICAL)  # it logs what it cannot trace; that is counted here
_MAX_ALIKE = 2
"""How many faults that look alike are made smaller and kept."""


@dataclass(frozen=True)
class Fault:
    """A program that does something else when it is compiled."""

    program: Program
    variant: str
    verdict: judge.Verdict

    @property
    def title(self) -> str:
        """What the fault looks like, without numbers and names."""
        where = re.sub(r"(call \d+: )|((?<=result)|(?<=argument)|(?<=state)) .*", "", self.verdict.label)
        return f"{self.variant}: {self.verdict.kind}: {where}"

    @property
    def script(self) -> str:
        """A script that runs by itself and shows the difference."""
        head = Path(judge.__file__).read_text().replace('DEVICE = "cpu"', f'DEVICE = "{judge.DEVICE}"')
        ending = f'if __name__ == "__main__":\n    raise SystemExit(show(CASE, {self.variant!r}))\n'
        return "\n\n".join((head, "# --- the program\n", self.program.source, ending))

    def smaller(self, max_seconds: float) -> Fault:
        """The same fault in the smallest program that is found by leaving things out."""
        end = time.monotonic() + max_seconds
        fault, is_smaller = self, True
        while is_smaller:
            is_smaller = False
            for program in fault.program.smaller():
                if time.monotonic() > end:
                    return fault
                found = _judge(program, self.variant)
                if found.is_fault and Fault(program, self.variant, found).title == self.title:
                    fault, is_smaller = Fault(program, self.variant, found), True
                    break
        return fault


@dataclass
class Summary:
    """What came of many programs."""

    num_programs: int = 0
    num_calls: int = 0
    """Of compiled functions."""
    num_replayed: int = 0
    num_warm: int = 0
    """Of programs whose plan was found on the disk by a second run."""
    verdicts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    titles: Counter[str] = field(default_factory=Counter)
    """How often each kind of fault was met."""
    faults: list[Fault] = field(default_factory=list)
    """Some of each kind, made smaller."""

    def add(self, other: Summary) -> None:
        """Count what another one counted, too."""
        self.num_programs += other.num_programs
        self.num_calls += other.num_calls
        self.num_replayed += other.num_replayed
        self.num_warm += other.num_warm
        for name in ("verdicts", "refused", "events", "titles"):
            getattr(self, name).update(getattr(other, name))
        self.faults += other.faults

    def count(self, verdict: judge.Verdict) -> None:
        self.num_calls += verdict.num_calls
        self.num_replayed += verdict.num_replayed
        self.num_warm += verdict.is_warm
        self.verdicts[verdict.kind] += 1
        self.events.update(verdict.events)
        if verdict.kind == "refused":
            self.refused[verdict.label] += 1


def fuzz(
    seed_number: int,
    num_programs: int,
    *,
    without: Collection[str] = (),
    max_seconds: float = float("inf"),
    shrink_seconds: float = 60.0,
    known: Collection[str] = (),
) -> Summary:
    """Judge random programs in every variant. The same seed gives the same programs.

    Args:
        seed_number: where drawing begins.
        num_programs: how many.
        without: groups of lines that are left out.
        max_seconds: when to stop.
        shrink_seconds: how long a fault is made smaller.
        known: titles of faults that are only counted.
    """
    summary, end = Summary(), time.monotonic() + max_seconds

    @settings(
        max_examples=num_programs,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @seed(seed_number)
    @given(programs(without))
    def each(program: Program) -> None:
        if time.monotonic() > end:
            return
        summary.num_programs += 1
        for variant in judge.variants(judge.DEVICE):
            verdict = _judge(program, variant)
            summary.count(verdict)
            if verdict.is_fault:
                fault = Fault(program, variant, verdict)
                summary.titles[fault.title] += 1
                if summary.titles[fault.title] <= _MAX_ALIKE and fault.title not in known:
                    summary.faults.append(fault.smaller(shrink_seconds))

    each()
    return summary


def _judge(program: Program, variant: str) -> judge.Verdict:
    return program.case().judge(**judge.variants(judge.DEVICE)[variant])
