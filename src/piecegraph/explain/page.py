"""The page about a failing run, as a value: evidence in, six sections out. What it reads like is in :mod:`wording`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from piecegraph.explain.advice import Suggestion, judge_suggestions
from piecegraph.explain.catalogue import load_catalogue
from piecegraph.explain.evidence import (
    PHASES,
    Certainty,
    Death,
    Evidence,
    Exit,
    Failure,
    FailureKind,
    Frame,
    Phase,
    Process,
    TreeLine,
)
from piecegraph.explain.frames import layers_of, phase_of, place_of
from piecegraph.explain.hangs import Hang, find_hang
from piecegraph.explain.known_issues import KnownIssue, find_matches
from piecegraph.explain.log.clock import are_comparable
from piecegraph.explain.root_cause import RootCause, Triage, find_root_cause, notice_of, triage

Outcome = Literal["failure", "stopped", "exits", "call chains", "nothing"]
"""``stopped``: asked to end, and nothing had failed before."""


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Processes that failed alike."""

    type: str
    message: str
    count: int
    processes: tuple[Process, ...]
    role: Literal["root", "other", "echo", "survived"]
    line: int | None
    certainty: Certainty
    kind: FailureKind = "exception"
    num_processes: int = 1
    """How many processes had it for certain; ``count`` is how often it was printed."""
    death: Death | None = None
    num_unnamed: int = 0
    """How many of the prints carry no name."""
    last_lines: tuple[str, ...] = ()
    """What a process that left no exception printed last."""


@dataclass(frozen=True, slots=True)
class Who:
    """Which processes failed, and how many ways to fail there are."""

    groups: tuple[FailureGroup, ...]
    """The root first."""
    seen: tuple[Process, ...]
    """Every process that the source names."""
    exits: tuple[Exit, ...]
    has_only_echoes: bool
    is_ordered: bool
    """Whether the source shows what came first."""

    @property
    def num_tracebacks(self) -> int:
        return sum(group.count for group in self.groups)


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase of the run."""

    phase: Phase
    state: Literal["done", "passed", "begun", "failed"]
    """``passed``: begun, never said to be done, but a later phase was reached. ``failed``: the stack or a record
    says so."""
    line: int | None
    size: str = ""


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """How far the run had come."""

    rows: tuple[PhaseRow, ...]
    failed: Phase | None
    layers: tuple[str, ...]
    """Through which layers the stack goes, outermost first."""


@dataclass(frozen=True, slots=True)
class StackLine:
    """A frame that is shown, or a run of them that is folded."""

    frame: Frame | None
    folded: str = ""
    is_innermost: bool = False


@dataclass(frozen=True, slots=True)
class StackPart:
    """The frames of one exception of the chain."""

    title: str
    lines: tuple[StackLine, ...]


@dataclass(frozen=True, slots=True)
class KnownMatch:
    """A known issue whose rule holds."""

    id: str
    title: str
    meaning: str
    fix: str
    fixed_in: str
    source: str
    rule: str
    is_of_root: bool
    """Whether it speaks of the root cause, and not of something else in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Everything that is printed, in the order in which it is."""

    sources: tuple[str, ...]
    num_lines: int
    outcome: Outcome
    root: RootCause | None
    notice: RootCause | None
    """The exception by which another process noticed the death that is the root."""
    who: Who
    hang: Hang | None
    """The collective that ranks waited in too long."""
    phase: PhaseReport
    stack: tuple[StackPart, ...]
    tree: tuple[TreeLine, ...]
    """Instead of stacks, where they had to be reconstructed."""
    known: tuple[KnownMatch, ...]
    suggestions: tuple[Suggestion, ...]
    artefacts: tuple[str, ...]
    num_call_chains: int
    num_cut_off: int
    """Those of them that are tracebacks whose exception is missing."""
    error_lines: tuple[tuple[str, int | None], ...]
    last_line: tuple[str, int | None] | None
    above: tuple[tuple[str, int | None], ...]
    """What was printed right above the line that tells of the end, where there is no exception."""
    other_runs: tuple[str, ...]
    """The other runs in the same log, a line each."""
    run_number: int
    """Which of the runs in the log this is."""
    stop: tuple[str, int | None] | None
    """The line that asked the run to end."""
    device_asserts: tuple[tuple[str, int | None], ...]
    xids: tuple[tuple[str, int | None], ...]
    """What the driver reported of a GPU."""
    notes: tuple[str, ...]


def compose(
    evidence: Evidence,
    catalogue: Sequence[KnownIssue] | None = None,
    *,
    other_runs: Sequence[Evidence] = (),
) -> Page:
    """Write the page.

    Args:
        evidence: what a log, or the records of a run, prove.
        catalogue: the known issues to look for; unless given, those that come with piecegraph.
        other_runs: the evidence of other runs in the same log.
    """
    found = triage(evidence)
    failure = found.root
    phase = _phases(evidence, failure, is_stopped=found.is_stopped)
    catalogue = load_catalogue() if catalogue is None else catalogue
    return Page(
        sources=evidence.sources,
        num_lines=evidence.num_lines,
        outcome=_outcome(evidence, found),
        root=find_root_cause(failure) if failure is not None and failure.chain else None,
        notice=find_root_cause(notice) if (notice := notice_of(found)) is not None else None,
        who=_who(evidence, found),
        hang=None if found.is_stopped else find_hang(evidence),
        phase=phase,
        stack=_stack(evidence, failure),
        tree=evidence.tree if failure is not None and failure.certainty == "reconstructed" else (),
        known=() if found.is_stopped else _known(evidence, failure, catalogue),
        suggestions=judge_suggestions(evidence, failure, phase.failed) if failure and not found.is_stopped else (),
        artefacts=evidence.artefacts,
        num_call_chains=evidence.num_call_chains,
        num_cut_off=evidence.num_cut_off,
        error_lines=evidence.error_lines,
        last_line=evidence.last_line,
        above=_lines_above(evidence, found),
        other_runs=tuple(_summary(run) for run in other_runs),
        run_number=1 + sum(run.first_line < evidence.first_line for run in other_runs),
        stop=next(((stop.text, stop.line) for stop in evidence.stops), None),
        device_asserts=evidence.device_asserts,
        xids=evidence.xids,
        notes=evidence.notes,
    )


def _outcome(evidence: Evidence, found: Triage) -> Outcome:
    if found.is_stopped:
        return "stopped"
    if found.root is not None:
        return "failure"
    if any(exit.code for exit in evidence.exits):
        return "exits"
    return "call chains" if evidence.num_call_chains else "nothing"


def _lines_above(evidence: Evidence, found: Triage) -> tuple[tuple[str, int | None], ...]:
    """Above the death that is the root; above the first exit code, if nothing but echoes tells of the failure."""
    if found.root is not None and found.root.death is not None:
        line = found.root.death.line
        return next((above.lines for above in evidence.above if above.line == line), ())
    is_mute = found.root is None or found.has_only_echoes
    return next((above.lines for above in evidence.above if is_mute and evidence.exits), ())


def _known(evidence: Evidence, failure: Failure | None, catalogue: Sequence[KnownIssue]) -> tuple[KnownMatch, ...]:
    # Some issues are known by a line of the log, and leave no exception behind.
    failure = failure or Failure(chain=(), kind="killed")
    lines = [text for text, _ in evidence.known_issue_lines]
    return tuple(
        KnownMatch(
            (issue := match.issue).id,
            issue.title,
            issue.meaning,
            issue.fix,
            issue.fixed_in,
            issue.source,
            match.rule,
            match.is_of_root,
        )
        for match in find_matches(failure, catalogue, lines)
    )


def _who(evidence: Evidence, found: Triage) -> Who:
    groups = [_group(found.root, "root")] if found.root is not None else []
    survived = set(map(id, found.survived))
    groups += [_group(failure, "survived" if id(failure) in survived else "other") for failure in found.others]
    groups += [_group(failure, "echo") for failure in found.echoes]
    is_recorded = all(failure.certainty == "recorded" for failure in evidence.failures)
    is_timed = are_comparable(failure.clock_s for failure in evidence.failures)
    return Who(
        tuple(groups),
        evidence.processes,
        evidence.exits,
        found.has_only_echoes,
        is_recorded or is_timed or len(evidence.sources) == 1,
    )


def _group(failure: Failure, role: Literal["root", "other", "echo", "survived"]) -> FailureGroup:
    cause = find_root_cause(failure) if failure.chain else None
    name, message = (cause.type, cause.message) if cause else (failure.kind, "")
    return FailureGroup(
        name,
        message,
        failure.count,
        failure.processes,
        role,
        failure.line,
        failure.certainty,
        failure.kind,
        failure.count if failure.certainty == "recorded" else failure.num_writers,
        failure.death,
        failure.num_unnamed,
        last_lines=failure.last_lines,
    )


def _phases(evidence: Evidence, failure: Failure | None, *, is_stopped: bool) -> PhaseReport:
    frames = [frame for raised in failure.chain for frame in raised.frames] if failure is not None else []
    if failure is not None and failure.certainty == "reconstructed":
        frames = [line.frame for line in evidence.tree if line.frame is not None]
    if failure is None:
        frames = [frame for chain in evidence.call_chains[:1] for frame in chain]
    failed = _failed_phase(evidence, frames) if failure is not None and not is_stopped else None
    rows = [row for phase in PHASES if (row := _phase_row(phase, evidence, failed)) is not None]
    return PhaseReport(tuple(rows), failed, layers_of(frames))


def _phase_row(phase: Phase, evidence: Evidence, failed: Phase | None) -> PhaseRow | None:
    found = [milestone for milestone in evidence.milestones if milestone.phase == phase]
    done = next((milestone for milestone in found if milestone.state == "done"), None)
    begun = next((milestone for milestone in found if milestone.state != "done"), None)
    size = next((milestone.size for milestone in reversed(found) if milestone.size), "")
    if phase == failed:
        return PhaseRow(phase, "failed", begun.line if begun else None, size)
    if done is not None:
        return PhaseRow(phase, "done", done.line, size)
    if begun is None:
        return None
    return PhaseRow(phase, "passed" if PHASES.index(phase) < _furthest(evidence) else "begun", begun.line, size)


def _furthest(evidence: Evidence) -> int:
    """How far the run is known to have come."""
    return max((PHASES.index(milestone.phase) for milestone in evidence.milestones), default=0)


def _failed_phase(evidence: Evidence, frames: Sequence[Frame]) -> Phase | None:
    """Where it failed: recorded as such, or seen in the stack. That a phase had begun is no proof."""
    noted = [milestone.phase for milestone in evidence.milestones if milestone.state == "failed"]
    if noted:
        return "capture" if "capture" in noted else noted[-1]
    return phase_of(frames)


def _stack(evidence: Evidence, failure: Failure | None) -> tuple[StackPart, ...]:
    if failure is None:
        return tuple(StackPart("call chain", fold(chain)) for chain in evidence.call_chains[:1])
    parts = []
    for raised in failure.chain:
        title = {"": "", "cause": "then, caused by it: ", "context": "then, while handling it: "}[raised.link]
        parts.append(StackPart(f"{title}{raised.type}", fold(raised.frames)))
    return tuple(part for part in parts if part.lines)


def fold(frames: Sequence[Frame]) -> tuple[StackLine, ...]:
    """Library frames in a row become one line; the innermost frame and the user's are kept."""
    lines: list[StackLine] = []
    run: list[Frame] = []
    for at, frame in enumerate(frames):
        is_innermost = at == len(frames) - 1
        place = place_of(frame.file)
        if place.owner in ("library", "python") and not is_innermost:
            if run and place_of(run[0].file).package != place.package:
                lines.append(_folded(run))
                run = []
            run.append(frame)
            continue
        if run:
            lines.append(_folded(run))
            run = []
        lines.append(StackLine(frame, is_innermost=is_innermost))
    return tuple(lines)


def _folded(run: Sequence[Frame]) -> StackLine:
    package = place_of(run[0].file).package
    if len(run) == 1:
        return StackLine(None, f"1 frame in {package}: {run[0].function}")
    return StackLine(None, f"{len(run)} frames in {package}: {run[0].function} to {run[-1].function}")


def _summary(run: Evidence) -> str:
    where = f"lines {run.first_line} to {run.first_line + run.num_lines - 1}"
    found = triage(run)
    if found.is_stopped:
        return f"{where}: stopped on request"
    if found.root is None or not found.root.chain:
        return f"{where}: no failure"
    cause = find_root_cause(found.root)
    return f"{where}: {cause.type}: {cause.message}"
