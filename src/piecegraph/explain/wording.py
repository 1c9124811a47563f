"""A page in plain words: six sections of labelled rows, which every format prints in its own way."""

from __future__ import annotations

from collections.abc import Sequence

from piecegraph.base.text import count_of
from piecegraph.explain.advice import Suggestion
from piecegraph.explain.evidence import Death, TreeLine
from piecegraph.explain.frames import place_of
from piecegraph.explain.hang_rows import hang_headline, hang_rows, is_about_hang
from piecegraph.explain.page import FailureGroup, KnownMatch, Outcome, Page, PhaseRow, StackLine
from piecegraph.explain.root_rows import root_rows
from piecegraph.explain.words import describe_exits, describe_frame, describe_line, describe_processes
from piecegraph.report.statements import PageRow, Section

MAX_GROUPS = 6
MAX_TREE_LINES = 30
MAX_STACK_LINES = 24
MAX_ARTEFACTS = 6
MAX_PLACE = 64
"""Sources stand in a column behind the frames, but for frames that are longer."""


def headline(page: Page) -> str:
    """The page in one sentence."""
    if page.outcome == "call chains" and page.num_cut_off:
        return "something failed: a traceback whose exception is not in this log"
    if page.outcome == "call chains":
        return f"{count_of(page.num_call_chains, 'call chain')}, no exception in this log"
    if page.outcome == "exits":
        return "a launcher saw processes fail; no exception in this log"
    if page.outcome == "stopped":
        return f"no failure: the run was stopped on request{f' ({page.root.type})' if page.root else ''}"
    if page.outcome == "nothing" and page.who.groups:
        number = count_of(page.who.num_tracebacks, "traceback")
        return f"no failure in this log: {number} that the run went on after"
    if page.outcome == "nothing" and page.error_lines:
        return f"no traceback in this log; its last error line: {page.error_lines[-1][0][:120]}"
    if page.root is None:
        return "no failure found in this log" if page.outcome == "nothing" else "a process died without an exception"
    if is_about_hang(page):
        return hang_headline(page)
    group = page.who.groups[0]
    name = page.root.type.rsplit(".", 1)[-1]
    distinct = sum(other.role in ("root", "other") for other in page.who.groups)
    others = sum(other.count for other in page.who.groups if other.role == "echo")
    where = f" in {_phase_name(page)}" if page.phase.failed else ""
    more = f"; {distinct - 1} more distinct {'failures' if distinct > 2 else 'failure'}" if distinct > 1 else ""
    echo = f"; {count_of(others, 'echo', 'echoes')} of it" if others else ""
    num_runs = 1 + len(page.other_runs)
    run = f"; run {page.run_number} of {num_runs}, and no later one failed" if page.run_number < num_runs else ""
    prints = f", printed {group.count} times" if group.count > group.num_processes else ""
    return f"{name}: {_how_many(group)}{where}{prints}{more}{echo}{run}"


def _how_many(group: FailureGroup) -> str:
    """How many failed, as far as it is proven."""
    if group.death is not None:
        return _how_many_died(group, group.death)
    if group.num_processes == 1:
        return "1 process failed" if group.count == 1 or group.processes else "failed"
    return f"{group.num_processes} processes failed alike"


def _how_many_died(group: FailureGroup, death: Death) -> str:
    if death.signal is None and death.name == "OUT_OF_MEMORY":
        return "a process was killed for want of memory"
    if death.signal is None and death.teller == "scheduler":
        return "the scheduler ended the job"
    number = count_of(group.num_processes, "process", "processes")
    by = " by this signal" if death.signal is not None else ""
    return f"{number} {'was' if group.num_processes == 1 else 'were'} ended{by}"


def sections(page: Page) -> tuple[Section, ...]:
    """The six sections, always all of them and in this order."""
    return (
        Section("ROOT CAUSE", tuple(root_rows(page))),
        Section("WHO", tuple(_who_rows(page))),
        Section("PHASE", tuple(_phase_rows(page))),
        Section("STACK", tuple(_stack_rows(page))),
        Section("ADVICE", tuple(_advice_rows(page))),
        Section("ARTEFACTS", tuple(_artefact_rows(page))),
    )


def _who_rows(page: Page) -> list[PageRow]:
    who, rows = page.who, []
    groups = who.groups
    if groups:
        distinct = len(groups)
        same = f": {groups[0].count} of {groups[0].count} identical" if distinct == 1 and groups[0].count > 1 else ""
        rows.append(PageRow("", f"{_how_many_prints(groups)}, {distinct} distinct{same}", "strong"))
    for group in groups[:MAX_GROUPS] if len(groups) > 1 or (groups and groups[0].processes) else ():
        rows.append(_group_row(group, page.outcome, is_alone=len(groups) == 1))
    if len(groups) > MAX_GROUPS:
        rows.append(PageRow("", f"and {len(groups) - MAX_GROUPS} more distinct ones", "quiet"))
    failing = {process for group in groups for process in group.processes}
    seen = [process for process in who.seen if process not in failing]
    if seen:
        rows.append(PageRow("also seen" if failing else "seen", describe_processes(seen)))
    if who.exits and page.outcome != "exits":
        is_recorded = all(group.certainty == "recorded" for group in groups)
        rows.append(PageRow("ended" if is_recorded else "launcher", describe_exits(page.who.exits)))
    rows += hang_rows(page) if not is_about_hang(page) else []
    rows += _certainty_rows(page)
    return rows or [PageRow("", "this log names no process")]


def _how_many_prints(groups: Sequence[FailureGroup]) -> str:
    deaths = sum(group.count for group in groups if group.death is not None)
    tracebacks = sum(group.count for group in groups) - deaths
    parts = [count_of(tracebacks, "traceback")] if tracebacks else []
    return ", ".join([*parts, count_of(deaths, "death")] if deaths else parts)


def _group_row(group: FailureGroup, outcome: Outcome, *, is_alone: bool) -> PageRow:
    label = {"root": "failed", "other": "also failed", "echo": "echo", "survived": "went on"}[group.role]
    if group.role == "root" and outcome == "stopped":
        label = "interrupted"
    names = describe_processes(group.processes)
    if is_alone:
        return PageRow(label, names)
    line = f", complete at {describe_line(group.line)}" if group.line is not None else ""
    shown = f"{group.type}: {group.message[:100]}" if group.message else group.type
    return PageRow(label, f"{group.count} x {shown}{f', by {names}' if names else ''}{line}")


def _certainty_rows(page: Page) -> list[PageRow]:
    groups = page.who.groups
    if not groups:
        return []
    kinds = {group.certainty for group in groups}
    tracebacks = [group for group in groups if group.death is None]
    is_named = all(not group.num_unnamed and group.certainty == "printed" for group in tracebacks)
    rows = []
    if kinds == {"recorded"}:
        return [PageRow("certain", "recorded by the processes themselves: who failed, and in which order")]
    if "reconstructed" in kinds:
        rows.append(PageRow("certain", "which exceptions were raised, and how often: counted in the log"))
        rows.append(PageRow("likely", "where each was raised and what followed: interleaved tracebacks, reconstructed"))
    elif "unwoven" in kinds:
        rows.append(
            PageRow("certain", "all of them: interleaved tracebacks, of which every line has its place in this story")
        )
    elif is_named and tracebacks:
        rows.append(PageRow("certain", "who printed it: the lines of every traceback carry the name of their process"))
    if not is_named and page.who.num_tracebacks > 1:
        rows.append(PageRow("cannot tell", _unnamed_tracebacks(page)))
    if not page.who.is_ordered and len(groups) > 1:
        rows.append(PageRow("cannot tell", "which failed first: the logs are of different processes"))
    elif sum(group.role in ("root", "other") for group in groups) > 1:
        where = "was complete first in this log" if len(page.sources) == 1 else "came first, by the times in these logs"
        rows.append(PageRow("likely", f"the root cause is the one that {where}"))
    return rows


def _unnamed_tracebacks(page: Page) -> str:
    groups = page.who.groups
    unnamed = sum(group.num_unnamed if group.certainty == "printed" else group.count for group in groups)
    if unnamed < page.who.num_tracebacks:
        return f"which process printed {unnamed} of them: the lines carry no name"
    why = " (it does not matter: all are alike)" if len(groups) == 1 else ""
    return f"which rank printed which traceback: no line of this log says it{why}"


def _phase_rows(page: Page) -> list[PageRow]:
    rows = [_phase_row(row) for row in page.phase.rows]
    if page.phase.layers:
        rows.append(PageRow("inside", " > ".join(page.phase.layers)))
    return rows or [PageRow("", "nothing says what the run was doing")]


def _phase_row(row: PhaseRow) -> PageRow:
    size = f"  {row.size}" if row.size else ""
    line = f"  {describe_line(row.line)}" if row.line is not None else ""
    if row.state == "done":
        return PageRow("done", f"{row.phase:<9}{line}{size}", "good")
    begun = f"  begun at {describe_line(row.line)}" if row.line is not None else ""
    if row.state == "passed":
        return PageRow("passed", f"{row.phase:<9}{begun}; later phases followed", "good")
    if row.state == "failed":
        return PageRow("FAILED", f"{row.phase:<9}{size}{begun}", "bad")
    return PageRow("begun", f"{row.phase:<9}{size}{begun}")


def _stack_rows(page: Page) -> list[PageRow]:
    if page.tree:
        rows = [
            PageRow(
                "", "reconstructed from interleaved tracebacks that differ; the number is how many passed here", "quiet"
            )
        ]
        shown = [line for line in page.tree if line.frame is None or place_of(line.frame.file).owner != "python"]
        rows += [_tree_row(line) for line in shown[:MAX_TREE_LINES]]
        if len(shown) > MAX_TREE_LINES:
            rows.append(PageRow("", f"... {len(shown) - MAX_TREE_LINES} more lines", "quiet"))
        return rows
    rows = []
    for number, part in enumerate(page.stack, 1):
        rows.append(PageRow("", f"{number}. {part.title}" if len(page.stack) > 1 else part.title, "strong"))
        lines = part.lines
        if len(lines) > MAX_STACK_LINES:
            half = MAX_STACK_LINES // 2
            hidden = StackLine(None, f"{len(lines) - 2 * half} more lines")
            lines = (*lines[:half], hidden, *lines[-half:])
        widths = [len(describe_frame(line.frame)) for line in lines if line.frame is not None and line.frame.source]
        width = max((number for number in widths if number <= MAX_PLACE), default=0)
        rows += [_stack_row(line, width) for line in lines]
    of_it = " of it" if page.outcome == "failure" else ""
    return rows or [PageRow("", f"this log holds no frames{of_it}")]


def _stack_row(line: StackLine, width: int) -> PageRow:
    if line.frame is None:
        return PageRow("", f"    ... {line.folded}", "quiet", is_code=True)
    mark = ">" if line.is_innermost else " "
    place = (
        f"{describe_frame(line.frame):<{width}}   {line.frame.source}"
        if line.frame.source
        else describe_frame(line.frame)
    )
    return PageRow("", f"  {mark} {place}", "strong" if line.is_innermost else "", is_code=True)


def _tree_row(line: TreeLine) -> PageRow:
    indent = "  " * min(line.depth, 20)
    if line.frame is None:
        return PageRow("", f"{indent}{line.count} x {line.text[:120]}", "bad", is_code=True)
    return PageRow("", f"{indent}{line.count} x {describe_frame(line.frame)}", is_code=True)


def _advice_rows(page: Page) -> list[PageRow]:
    matching = [known for known in page.known if known.is_of_root]
    rows = [row for known in matching[:1] for row in _known_rows(known)]
    rows += [PageRow("also matches", f"{known.title}  ({known.id})", "quiet") for known in matching[1:]]
    if page.outcome == "failure" and not matching:
        rows.append(PageRow("known issue", "none of the catalogue matches", "quiet"))
    others = [known for known in page.known if not known.is_of_root]
    rows += [PageRow("elsewhere", f"a line of this log tells of: {known.title}  ({known.id})") for known in others]
    for suggestion in page.suggestions:
        rows.append(_suggestion_row(suggestion))
    if page.outcome == "call chains":
        rows.append(PageRow("", "if a run did fail, give all of its output: the exception is not in this part"))
    if page.outcome in ("nothing", "exits"):
        rows.append(
            PageRow(
                "", "if a run did fail, look for the standard error of its workers, or run it again with a recorder"
            )
        )
    return rows


def _suggestion_row(suggestion: Suggestion) -> PageRow:
    where = f" (printed at {describe_line(suggestion.line)})" if suggestion.line is not None else " (printed)"
    why = f": {suggestion.why}" if suggestion.why else ""
    return PageRow(
        suggestion.fit, f'"{suggestion.text}"{where}{why}', "quiet" if suggestion.fit == "does not fit" else ""
    )


def _known_rows(known: KnownMatch) -> list[PageRow]:
    rows = [
        PageRow("known issue", f"{known.title}  ({known.id})", "strong"),
        PageRow("means", known.meaning),
        PageRow("fix", known.fix),
    ]
    if known.fixed_in:
        rows.append(PageRow("fixed in", known.fixed_in))
    return [*rows, PageRow("rule", known.rule, "quiet"), PageRow("source", known.source, "quiet")]


def _artefact_rows(page: Page) -> list[PageRow]:
    rows = [PageRow("", artefact) for artefact in page.artefacts[:MAX_ARTEFACTS]]
    if len(page.artefacts) > MAX_ARTEFACTS:
        rows.append(PageRow("", f"and {len(page.artefacts) - MAX_ARTEFACTS} more", "quiet"))
    return rows or [PageRow("", "none named", "quiet")]


def _phase_name(page: Page) -> str:
    size = next((row.size for row in page.phase.rows if row.state == "failed" and row.size), "")
    return f"{page.phase.failed}{f' of {size}' if size else ''}"
