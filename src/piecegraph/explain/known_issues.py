"""The catalogue of known issues: a failure comes in, the entries that explain it go out, the most specific first.

The entries are data, read by :mod:`catalogue` (a user may add files of their own). The one invariant: an entry matches
what the source printed, the exception AND a frame, so that it does not speak up about an unrelated failure. Where the
exception alone is decisive the entry says why; causes that raise nothing in Python are found by a line of the log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from piecegraph.explain.evidence import Failure, Raised

EDGE_CHARS = 65_536
"""A longer text is searched at both ends only: a build log of megabytes names its cause at one of them."""
LINE_CHARS = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIssue:
    """One entry of the catalogue."""

    id: str
    """Kebab-case, unique, stable."""
    title: str
    meaning: str
    """What has happened, for someone who has not met it before."""
    fix: str
    fixed_in: str = ""
    """The version that no longer has it; empty where there is none."""
    source: str
    """Where this is known from: an address, or "seen with ..."."""
    exception: re.Pattern[str] | None = None
    """Searched in ``Type: message`` of every exception of the chain."""
    frame: re.Pattern[str] | None = None
    """Searched in ``file:function`` of every frame of the chain."""
    frame_free: str = ""
    """Why the exception alone is decisive, where there is no ``frame``."""
    log_line: re.Pattern[str] | None = None
    """Searched in lines that belong to no exception; a rule of its own."""
    line_words: tuple[str, ...] = ()
    """A line that ``log_line`` matches holds one of these. Looking for them first makes a log of 100 MB quick."""
    refines: tuple[str, ...] = ()
    """Entries that this one is a special case of; it is named before them."""
    echo: bool = False
    """It tells of another failure's consequence, and is named after entries that tell of a cause."""
    examples: tuple[str, ...] = ()
    """Logs for which it must be named; ``explain --check`` tries them."""
    counter_examples: tuple[str, ...] = ()
    """Logs that look like it, for which it must not be."""
    defined_at: str = ""
    """The file, and the line of it."""
    specificity: int = 0
    """The length of the longest chain of ``refines`` below this entry."""

    @property
    def rule(self) -> str:
        """When this entry speaks up, for people."""
        return "; or ".join(filter(None, (self.exception_rule, self.line_rule)))

    @property
    def exception_rule(self) -> str:
        """The part of the rule about exceptions."""
        if self.exception is None:
            return ""
        also = f"a frame matches /{self.frame.pattern}/" if self.frame else f"any frame ({self.frame_free})"
        return f"an exception matches /{self.exception.pattern}/ and {also}"

    @property
    def line_rule(self) -> str:
        """The part of the rule about lines."""
        return f"a line matches /{self.log_line.pattern}/" if self.log_line else ""


@dataclass(frozen=True, slots=True)
class Match:
    """An entry whose rule holds."""

    issue: KnownIssue
    is_of_root: bool
    """Whether it speaks of the failure itself. A line elsewhere in the log may tell of something beside it."""
    rule: str
    """The part of its rule that holds."""


def match_known_issues(
    failure: Failure, catalogue: Iterable[KnownIssue], lines: Iterable[str] = ()
) -> tuple[KnownIssue, ...]:
    """The entries that explain a failure: causes before echoes, the most specific first.

    Args:
        failure: its whole chain is looked at, since the cause is as often the first exception as the last.
        catalogue: the entries to try.
        lines: lines of the log that belong to no exception, for the entries that know their cause by one.
    """
    return tuple(match.issue for match in find_matches(failure, catalogue, lines))


def find_matches(failure: Failure, catalogue: Iterable[KnownIssue], lines: Iterable[str] = ()) -> tuple[Match, ...]:
    """The same with how they belong to the failure; those that only a line beside it tells of come last."""
    texts = [_exception_text(raised) for raised in failure.chain]
    frames = {
        f"{frame.file}:{frame.function}".replace("\\", "/") for raised in failure.chain for frame in raised.frames
    }
    first_related = _first_related(failure.chain, texts)
    catalogue = tuple(catalogue)
    by_line = _matched_lines(catalogue, lines)
    own_lines = (*(text.partition("\n")[0] for text in texts), *failure.last_lines)
    positions = {issue.id: _matched_at(issue, texts, frames) for issue in catalogue}
    raised_ids = {name for name, position in positions.items() if position is not None}
    found = []
    for order, issue in enumerate(catalogue):
        position = positions[issue.id]
        if position is None and issue.id not in by_line:
            continue
        is_raised = position is not None or not raised_ids.isdisjoint(issue.refines)
        is_quoted = any(line in own for line in by_line.get(issue.id, ()) for own in own_lines)
        is_of_root = is_raised or is_quoted or not texts
        at = len(texts) if position is None else position
        tier = (not is_of_root, issue.echo, not is_raised)
        rule = issue.line_rule if position is None else issue.exception_rule
        rank = (*tier, at < first_related, -issue.specificity, issue.frame is None, at, order)
        found.append((rank, Match(issue, is_of_root, rule)))
    return tuple(match for _, match in sorted(found, key=lambda pair: pair[0]))


def _matched_lines(catalogue: Sequence[KnownIssue], lines: Iterable[str]) -> dict[str, list[str]]:
    """The lines by which entries know their cause, by the id of the entry."""
    entries_of = log_line_matcher(catalogue)
    found: dict[str, list[str]] = {}
    for line in lines:
        for issue in entries_of(line):
            found.setdefault(issue.id, []).append(line.strip())
    return found


def log_line_matcher(catalogue: Iterable[KnownIssue]) -> Callable[[str], tuple[KnownIssue, ...]]:
    """A function that takes a line and gives the entries that know their cause by it, the most specific first.

    Make it once and call it for every line of a log; nearly all of them are dismissed in a few microseconds.
    """
    rules = [(word, issue.log_line, issue) for issue in catalogue if issue.log_line for word in issue.line_words]

    def entries_of(line: str) -> tuple[KnownIssue, ...]:
        hits = [(pattern, issue) for word, pattern, issue in rules if word in line]
        found = {issue.id: issue for pattern, issue in hits if pattern.search(line[:LINE_CHARS])}
        return tuple(sorted(found.values(), key=lambda issue: (issue.echo, -issue.specificity)))

    return entries_of


def watched_words(catalogue: Iterable[KnownIssue]) -> tuple[str, ...]:
    """The fewest words of which every line holds one that an entry knows its cause by: each costs a look at the log."""
    words = dict.fromkeys(word for issue in catalogue for word in issue.line_words)
    return tuple(word for word in words if not any(other in word for other in words if other != word))


def describe(issue: KnownIssue) -> str:
    """An entry as a paragraph of a list."""
    rows = [
        ("means", issue.meaning),
        ("fix", issue.fix),
        ("fixed in", issue.fixed_in),
        ("rule", issue.rule),
        ("source", issue.source),
    ]
    return "\n".join([f"{issue.id}: {issue.title}", *(f"  {name:<9}{text}" for name, text in rows if text)])


def _exception_text(raised: Raised) -> str:
    text = "\n".join([f"{raised.type}: {raised.message}", *raised.notes])
    return text if len(text) <= 2 * EDGE_CHARS else f"{text[:EDGE_CHARS]}\n{text[-EDGE_CHARS:]}"


def _first_related(chain: Sequence[Raised], texts: Sequence[str]) -> int:
    """From where on the exceptions of the chain belong together.

    An exception that merely was being handled when an unrelated one was raised (a missing optional package, say) is no
    part of it. One that is named as the cause, or quoted by the next, is.
    """
    first = len(chain) - 1
    while first > 0:
        quote = chain[first - 1].message.strip().partition("\n")[0]
        if chain[first].link != "cause" and not (quote and quote in texts[first]):
            break
        first -= 1
    return first


def _matched_at(issue: KnownIssue, texts: Sequence[str], frames: Iterable[str]) -> int | None:
    """The first exception of the chain that the entry matches, if the frames agree."""
    if issue.exception is None:
        return None
    position = next((index for index, text in enumerate(texts) if issue.exception.search(text)), None)
    if position is None or issue.frame is None or any(issue.frame.search(frame) for frame in frames):
        return position
    return None
