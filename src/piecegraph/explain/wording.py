"""A page in plain words: six sections of labelled rows, which every format prints in its own way."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from piecegraph.base.text import count_of
from piecegraph.explain.advice import Suggestion
from piecegraph.explain.evidence import Death, Frame, Process, TreeLine, signal_name
from piecegraph.explain.frames import place_of
from piecegraph.explain.page import FailureGroup, KnownMatch, Outcome, Page, PhaseRow, StackLine
from piecegraph.explain.root_cause import RootCause
from piecegraph.report.statements import PageRow, Section, Tone

MAX_GROUPS = 6
MAX_TREE_LINES = 30
MAX_STACK_LINES = 24
MAX_ARTEFACTS = 6
MAX_LINES_BEFORE = 200
"""What was printed as an error that close before a process died, or a command failed, may be the reason."""
MAX_PLACE = 64
"""Sources stand in a column behind the frames, but for frames that are longer."""
_NUMBERED = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)$")
_MAX_NAMES = 12


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
        Section("ROOT CAUSE", tuple(_root_rows(page))),
        Section("WHO", tuple(_who_rows(page))),
        Section("PHASE", tuple(_phase_rows(page))),
        Section("STACK", tuple(_stack_rows(page))),
        Section("ADVICE", tuple(_advice_rows(page))),
        Section("ARTEFACTS", tuple(_artefact_rows(page))),
    )


def _root_rows(page: Page) -> list[PageRow]:
    root = page.root
    if root is None:
        return _no_root_rows(page)
    rows = _stop_rows(page) if page.outcome == "stopped" else []
    if page.who.has_only_echoes and page.who.groups[0].certainty != "recorded":
        why = "such a failure comes when another process fails or hangs"
        rest = "" if _before_rows(page) else "; nothing in this log reads like that"
        rows.append(PageRow("only echoes", why + rest, "quiet"))
    tone: Tone = "bad" if page.outcome == "failure" else ""
    rows.append(PageRow("", f"{root.type}: {root.message}" if root.message else root.type, tone))
    rows += [PageRow("", detail, is_detail=True) for detail in root.details]
    rows += [PageRow("kernel said", f"{text}  ({_line(line)})") for text, line in _kernel_words(page)]
    rows += [PageRow("driver said", f"{text}  ({_line(line)})") for text, line in page.xids[:3]]
    rows += _death_rows(page)
    is_guess = page.who.groups[0].certainty == "reconstructed"
    if root.frame is not None:
        rows += _frame_rows("raised at", root.frame, "  (reconstructed)" if is_guess else "")
    if root.user_code is not None:
        rows += _frame_rows("user code", root.user_code, "  (quoted by Dynamo)")
    elif root.reached_from is not None:
        rows += _frame_rows("reached from", root.reached_from, f"  ({_reached_note(root)})")
    for shown in root.shown_as:
        text = f"{shown.type}: {shown.message}" if shown.how != "wraps" else f"{shown.type}, which wraps it"
        rows.append(PageRow("shown as" if shown.how == "wraps" else "then", text))
        if shown.how != "wraps":
            how = "as its direct consequence" if shown.how == "cause" else "while the first was being handled"
            rows.append(
                PageRow(
                    "", f"raised {how}" + (f", at {_at(shown.frame)}" if shown.frame else ""), "quiet", is_detail=True
                )
            )
    rows += [
        PageRow("" if at else "last printed", line, "quiet", is_code=True, is_detail=at > 0)
        for at, line in enumerate(page.who.groups[0].last_lines)
    ]
    if root.is_asynchronous:
        rows.append(PageRow("mind", "the GPU reports such an error late: the frame may be innocent", "quiet"))
    return rows


def _reached_note(root: RootCause) -> str:
    assert root.frame is not None
    assert root.reached_from is not None
    place = place_of(root.reached_from.file)
    if place.owner == "library":
        package = place_of(root.frame.file).package
        return f"innermost frame outside {'Python itself' if package == 'python' else package}"
    return "innermost frame outside the libraries" if place.is_installed else "innermost frame outside site-packages"


def _stop_rows(page: Page) -> list[PageRow]:
    if page.stop is None:
        return [PageRow("", "no failure: the run was interrupted, where it was:", "good")]
    text, line = page.stop
    return [PageRow("", f"no failure: the run was asked to end at {_line(line)}: {text}", "good")]


def _kernel_words(page: Page) -> tuple[tuple[str, int | None], ...]:
    """The checks that failed on the device, where the error is one that the GPU reports late."""
    return page.device_asserts[:3] if page.root is not None and page.root.is_asynchronous else ()


def _death_rows(page: Page) -> list[PageRow]:
    """Who told of a death, who noticed it; and the errors before it, or before a command that failed: both are mute."""
    group, notice, rows = page.who.groups[0], page.notice, []
    if group.death is not None:
        own = {"process": "the process's own crash handler", "launcher": "its launcher", "parent": "its parent process"}
        where = f", {_line(group.death.line)}" if group.death.line is not None else ""
        rows.append(PageRow("told by", own.get(group.death.teller, f"the {group.death.teller}") + where))
    if notice is not None:
        rows.append(PageRow("noticed as", f"{notice.type}: {notice.message}"))
        place = notice.reached_from or notice.frame
        rows += _frame_rows("noticed at", place) if place is not None else []
    return [*rows, *_before_rows(page)]


def _before_rows(page: Page) -> list[PageRow]:
    errors = _errors_before(page)
    rows = [PageRow("error before", f"{_line(line)}: {text}") for text, line in errors]
    return rows + [
        PageRow("line before", f"{_line(line)}: {text}") for text, line in page.above if (text, line) not in errors
    ]


def _errors_before(page: Page) -> list[tuple[str, int | None]]:
    """The first and the last error printed shortly before a failure that says nothing of its reason."""
    if page.outcome == "exits":
        end = page.who.exits[0].line
    else:
        group = page.who.groups[0]
        is_mute = page.who.has_only_echoes or group.type.endswith("CalledProcessError")
        end = group.line if is_mute or group.kind in ("signal", "killed") else None
    if end is None:
        return []
    before = [(text, line) for text, line in page.error_lines if line and 0 < end - line <= MAX_LINES_BEFORE]
    return list(dict.fromkeys((*before[:1], *before[-1:])))


def _no_root_rows(page: Page) -> list[PageRow]:
    if page.outcome == "stopped":
        return _stop_rows(page)
    if page.outcome == "exits":
        return [PageRow("", _exits(page), "bad"), *_before_rows(page)]
    if page.outcome == "failure":
        group = page.who.groups[0]
        return [PageRow("", f"{group.type}: no exception was left behind", "bad")]
    if page.outcome == "call chains":
        number = count_of(page.num_call_chains, "call chain")
        rows = [PageRow("", f"none: {number}, no exception. A stack that somebody printed is not a failure.", "good")]
        if page.num_cut_off:
            rows = [PageRow("", "not in this log: a traceback ends before its exception", "bad")]
            rows += [PageRow("error line", f"{_line(line)}: {text}") for text, line in page.error_lines]
        end = next((line.frame for part in page.stack for line in part.lines if line.is_innermost), None)
        return [*rows, *(_frame_rows("ends at", end) if end is not None else [])]
    if page.who.groups:
        rows = [PageRow("", "none: the run went on after every traceback in this log", "good")]
        return [*rows, *map(_survived_row, page.who.groups[:3])]
    lines = count_of(page.num_lines, "line")
    rows = [PageRow("", f"none found: nothing in {lines} reads like a traceback or like the end of a process")]
    for text, line in page.error_lines:
        rows.append(PageRow("error line", f"{_line(line)}: {text}"))
    if page.stop is not None:
        rows.append(PageRow("asked to end", f"{_line(page.stop[1])}: {page.stop[0]}"))
    if page.last_line is not None:
        rows.append(PageRow("last line", f"{_line(page.last_line[1])}: {page.last_line[0][:160]}"))
    return rows


def _survived_row(group: FailureGroup) -> PageRow:
    how = {"logged": "logged as less than an error", "thread": "in a side thread", "exception": "caught"}.get(
        group.kind, "ignored by Python"
    )
    return PageRow("went on after", f"{group.type}: {group.message}, {how}, {_line(group.line)}")


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
        rows.append(PageRow("also seen" if failing else "seen", _describe_processes(seen)))
    if who.exits and page.outcome != "exits":
        is_recorded = all(group.certainty == "recorded" for group in groups)
        rows.append(PageRow("ended" if is_recorded else "launcher", _exits(page)))
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
    names = _describe_processes(group.processes)
    if is_alone:
        return PageRow(label, names)
    line = f", complete at {_line(group.line)}" if group.line is not None else ""
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
    line = f"  {_line(row.line)}" if row.line is not None else ""
    if row.state == "done":
        return PageRow("done", f"{row.phase:<9}{line}{size}", "good")
    begun = f"  begun at {_line(row.line)}" if row.line is not None else ""
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
        widths = [len(_at(line.frame)) for line in lines if line.frame is not None and line.frame.source]
        width = max((number for number in widths if number <= MAX_PLACE), default=0)
        rows += [_stack_row(line, width) for line in lines]
    of_it = " of it" if page.outcome == "failure" else ""
    return rows or [PageRow("", f"this log holds no frames{of_it}")]


def _stack_row(line: StackLine, width: int) -> PageRow:
    if line.frame is None:
        return PageRow("", f"    ... {line.folded}", "quiet", is_code=True)
    mark = ">" if line.is_innermost else " "
    place = f"{_at(line.frame):<{width}}   {line.frame.source}" if line.frame.source else _at(line.frame)
    return PageRow("", f"  {mark} {place}", "strong" if line.is_innermost else "", is_code=True)


def _tree_row(line: TreeLine) -> PageRow:
    indent = "  " * min(line.depth, 20)
    if line.frame is None:
        return PageRow("", f"{indent}{line.count} x {line.text[:120]}", "bad", is_code=True)
    return PageRow("", f"{indent}{line.count} x {_at(line.frame)}", is_code=True)


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
    where = f" (printed at {_line(suggestion.line)})" if suggestion.line is not None else " (printed)"
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


def _exits(page: Page) -> str:
    first = next((exit for exit in page.who.exits if exit.is_first), None)
    first_words = (
        f"{_describe_processes([first.process])} was the first to end ({_describe_code(first.code)}); " if first else ""
    )
    by_code: dict[int, int] = {}
    for exit in page.who.exits:
        by_code[exit.code] = by_code.get(exit.code, 0) + 1
    return first_words + ", ".join(f"{number} x {_describe_code(code)}" for code, number in by_code.items())


def _frame_rows(label: str, frame: Frame, note: str = "") -> list[PageRow]:
    rows = [PageRow(label, f"{_at(frame)}{note}")]
    return [*rows, PageRow("", frame.source, "quiet", is_code=True, is_detail=True)] if frame.source else rows


def _at(frame: Frame) -> str:
    name = f" in {frame.function}" if frame.function else ""
    return f"{place_of(frame.file).path}:{frame.line}{name}"


def _phase_name(page: Page) -> str:
    size = next((row.size for row in page.phase.rows if row.state == "failed" and row.size), "")
    return f"{page.phase.failed}{f' of {size}' if size else ''}"


def _line(line: int | None) -> str:
    return f"line {line}" if line is not None else "unknown line"


def _describe_code(code: int) -> str:
    """An exit code in words.

    >>> _describe_code(-9)
    'killed by SIGKILL'
    >>> _describe_code(1), _describe_code(-1)
    ('exit code 1', 'exit code -1')
    """
    if code >= -1:  # hardly ever SIGHUP, and what many programs exit with
        return f"exit code {code}"
    return f"killed by {signal_name(-code)}"


def _describe_processes(processes: Iterable[Process]) -> str:
    """Names with consecutive numbers as spans.

    >>> _describe_processes([Process("rank0"), Process("rank1"), Process("rank2"), Process("Worker_TP0", pid=7)])
    'rank0 to rank2, Worker_TP0 (pid 7)'
    """
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    names: list[str] = []
    for process in processes:
        found = _NUMBERED.match(process.label)
        if found is not None and process.pid is None and process.host is None:
            if found["stem"] not in numbers:
                names.append(found["stem"])
            numbers[found["stem"]].append(int(found["number"]))
        else:
            names.append(_full_name(process))
    parts = [part for name in names for part in (_spans(name, numbers[name]) if name in numbers else [name])]
    if len(parts) > _MAX_NAMES:
        parts = [*parts[:_MAX_NAMES], f"and {len(parts) - _MAX_NAMES} more"]
    return ", ".join(parts)


def _spans(stem: str, numbers: list[int]) -> list[str]:
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [
        f"{stem}{first}" if first == last else f"{stem}{first}{', ' if last == first + 1 else ' to '}{stem}{last}"
        for first, last in found
    ]


def _full_name(process: Process) -> str:
    is_named_so = process.pid is None or process.label == f"pid {process.pid}"
    more = [f"pid {process.pid}"] * (not is_named_so) + [f"on {process.host}"] * (process.host is not None)
    return f"{process.label} ({', '.join(more)})" if more else process.label
