"""The section ROOT CAUSE of a page."""

from __future__ import annotations

from piecegraph.base.text import count_of
from piecegraph.explain.frames import place_of
from piecegraph.explain.hang_rows import hang_rows, is_about_hang
from piecegraph.explain.log.collectives import is_report
from piecegraph.explain.page import FailureGroup, Page
from piecegraph.explain.root_cause import RootCause
from piecegraph.explain.words import describe_exits, describe_frame, describe_line, frame_rows
from piecegraph.report.statements import PageRow, Tone

MAX_LINES_BEFORE = 200
"""What was printed as an error that close before a process died, or a command failed, may be the reason."""


def root_rows(page: Page) -> list[PageRow]:
    """What went wrong first, or why nothing is known to have."""
    root = page.root
    if root is None:
        return _no_root_rows(page)
    rows = _stop_rows(page) if page.outcome == "stopped" else []
    if page.who.has_only_echoes and page.who.groups[0].certainty != "recorded":
        why = "such a failure comes when another process fails or hangs"
        rest = "" if _before_rows(page) or page.hang is not None else "; nothing in this log reads like that"
        rows.append(PageRow("only echoes", why + rest, "quiet"))
    tone: Tone = "bad" if page.outcome == "failure" else ""
    rows.append(PageRow("", f"{root.type}: {root.message}" if root.message else root.type, tone))
    rows += [PageRow("", detail, is_detail=True) for detail in root.details]
    rows += hang_rows(page) if is_about_hang(page) else []
    rows += [PageRow("kernel said", f"{text}  ({describe_line(line)})") for text, line in _kernel_words(page)]
    rows += [PageRow("driver said", f"{text}  ({describe_line(line)})") for text, line in page.xids[:3]]
    rows += _death_rows(page)
    is_guess = page.who.groups[0].certainty == "reconstructed"
    if root.frame is not None:
        rows += frame_rows("raised at", root.frame, "  (reconstructed)" if is_guess else "")
    if root.user_code is not None:
        rows += frame_rows("user code", root.user_code, "  (quoted by Dynamo)")
    elif root.reached_from is not None:
        rows += frame_rows("reached from", root.reached_from, f"  ({_reached_note(root)})")
    for shown in root.shown_as:
        text = f"{shown.type}: {shown.message}" if shown.how != "wraps" else f"{shown.type}, which wraps it"
        rows.append(PageRow("shown as" if shown.how == "wraps" else "then", text))
        if shown.how != "wraps":
            how = "as its direct consequence" if shown.how == "cause" else "while the first was being handled"
            rows.append(
                PageRow(
                    "",
                    f"raised {how}" + (f", at {describe_frame(shown.frame)}" if shown.frame else ""),
                    "quiet",
                    is_detail=True,
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
    return [PageRow("", f"no failure: the run was asked to end at {describe_line(line)}: {text}", "good")]


def _kernel_words(page: Page) -> tuple[tuple[str, int | None], ...]:
    """The checks that failed on the device, where the error is one that the GPU reports late."""
    return page.device_asserts[:3] if page.root is not None and page.root.is_asynchronous else ()


def _death_rows(page: Page) -> list[PageRow]:
    """Who told of a death, who noticed it; and the errors before it, or before a command that failed: both are mute."""
    group, notice, rows = page.who.groups[0], page.notice, []
    if group.death is not None:
        own = {"process": "the process's own crash handler", "launcher": "its launcher", "parent": "its parent process"}
        where = f", {describe_line(group.death.line)}" if group.death.line is not None else ""
        rows.append(PageRow("told by", own.get(group.death.teller, f"the {group.death.teller}") + where))
    if notice is not None:
        rows.append(PageRow("noticed as", f"{notice.type}: {notice.message}"))
        place = notice.reached_from or notice.frame
        rows += frame_rows("noticed at", place) if place is not None else []
    return [*rows, *_before_rows(page)]


def _before_rows(page: Page) -> list[PageRow]:
    errors = _errors_before(page)
    lines = [("error before", *error) for error in errors]
    lines += [("line before", *above) for above in page.above if above not in errors]
    return [
        PageRow(label, f"{describe_line(line)}: {text}")
        for label, text, line in lines
        if not (is_about_hang(page) and _tells_the_same(text, page))
    ]


def _tells_the_same(text: str, page: Page) -> bool:
    """Whether the rows about who waited say what is in a line."""
    return is_report(text) or (page.root is not None and page.root.type in text)


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
        return [PageRow("", describe_exits(page.who.exits), "bad"), *_before_rows(page)]
    if page.outcome == "failure":
        group = page.who.groups[0]
        return [PageRow("", f"{group.type}: no exception was left behind", "bad")]
    if page.outcome == "call chains":
        number = count_of(page.num_call_chains, "call chain")
        rows = [PageRow("", f"none: {number}, no exception. A stack that somebody printed is not a failure.", "good")]
        if page.num_cut_off:
            rows = [PageRow("", "not in this log: a traceback ends before its exception", "bad")]
            rows += [PageRow("error line", f"{describe_line(line)}: {text}") for text, line in page.error_lines]
        end = next((line.frame for part in page.stack for line in part.lines if line.is_innermost), None)
        return [*rows, *(frame_rows("ends at", end) if end is not None else [])]
    if page.who.groups:
        rows = [PageRow("", "none: the run went on after every traceback in this log", "good")]
        return [*rows, *map(_survived_row, page.who.groups[:3])]
    lines = count_of(page.num_lines, "line")
    rows = [PageRow("", f"none found: nothing in {lines} reads like a traceback or like the end of a process")]
    for text, line in page.error_lines:
        rows.append(PageRow("error line", f"{describe_line(line)}: {text}"))
    if page.stop is not None:
        rows.append(PageRow("asked to end", f"{describe_line(page.stop[1])}: {page.stop[0]}"))
    if page.last_line is not None:
        rows.append(PageRow("last line", f"{describe_line(page.last_line[1])}: {page.last_line[0][:160]}"))
    return rows


def _survived_row(group: FailureGroup) -> PageRow:
    how = {"logged": "logged as less than an error", "thread": "in a side thread", "exception": "caught"}.get(
        group.kind, "ignored by Python"
    )
    return PageRow("went on after", f"{group.type}: {group.message}, {how}, {describe_line(group.line)}")
