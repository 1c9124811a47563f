"""The catalogue of known issues: a failure comes in, the entries that explain it go out, the most specific first.

The entries are data (``known_issues.toml``; a team may add a file of its own). The one invariant: an entry matches what
the source printed, the exception AND a frame, so that it does not speak up about an unrelated failure. Where the
exception alone is decisive the entry says why; causes that raise nothing in Python are found by a line of the log.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from piecegraph.errors import ConfigError
from piecegraph.explain.evidence import Failure, Raised

REQUIRED = ("id", "title", "meaning", "fix", "source")
PATTERNS = ("exception", "frame", "log_line")
TEXTS = (*REQUIRED, "frame_free", "fixed_in")
OPTIONAL = (*PATTERNS, "frame_free", "fixed_in", "refines", "echo")
EDGE_CHARS = 65_536
"""A longer text is searched at both ends only: a build log of megabytes names its cause at one of them."""
LINE_CHARS = 4_096
MIN_WORD = 6
GAP = "\x00"
"""Stands for what varies in a pattern."""


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
    specificity: int = 0
    """The length of the longest chain of ``refines`` below this entry."""

    @property
    def rule(self) -> str:
        """When this entry speaks up, for people."""
        clauses = []
        if self.exception:
            also = f"a frame matches /{self.frame.pattern}/" if self.frame else f"any frame ({self.frame_free})"
            clauses.append(f"an exception matches /{self.exception.pattern}/ and {also}")
        if self.log_line:
            clauses.append(f"a line matches /{self.log_line.pattern}/")
        return "; or ".join(clauses)


def load_catalogue(extra: Path | None = None) -> tuple[KnownIssue, ...]:
    """The entries that come with piecegraph, and those of the file ``extra``.

    >>> len(load_catalogue()) >= 30
    True
    """
    shipped = files("piecegraph.explain").joinpath("known_issues.toml")
    issues = parse_catalogue(shipped.read_text(encoding="utf-8"), "known_issues.toml")
    if extra is not None:
        try:
            text = extra.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _malformed(str(extra), str(error), "give the path of a TOML file in UTF-8") from error
        issues += parse_catalogue(text, str(extra))
    return _ranked(issues)


def parse_catalogue(text: str, name: str) -> tuple[KnownIssue, ...]:
    """The entries of one file. What they refine may be in another."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _malformed(name, str(error), "write TOML: one [[issue]] table for each entry") from error
    entries = document.pop("issue", [])
    if document or not isinstance(entries, list):
        odd = ", ".join(map(repr, document)) or "'issue', which is no list of tables"
        raise _malformed(name, f"it holds {odd}", "one [[issue]] table for each entry, and nothing else")
    return tuple(_entry(entry, f"{name}, entry {number}") for number, entry in enumerate(entries, 1))


def match_known_issues(
    failure: Failure, catalogue: Iterable[KnownIssue], lines: Iterable[str] = ()
) -> tuple[KnownIssue, ...]:
    """The entries that explain a failure: causes before echoes, the most specific first.

    Args:
        failure: its whole chain is looked at, since the cause is as often the first exception as the last.
        catalogue: the entries to try.
        lines: lines of the log that belong to no exception, for the entries that know their cause by one.
    """
    texts = [_exception_text(raised) for raised in failure.chain]
    frames = {
        f"{frame.file}:{frame.function}".replace("\\", "/") for raised in failure.chain for frame in raised.frames
    }
    first_related = _first_related(failure.chain, texts)
    catalogue = tuple(catalogue)
    entries_of = log_line_matcher(catalogue)
    by_line = {issue.id for line in lines for issue in entries_of(line)}
    found = []
    for order, issue in enumerate(catalogue):
        position = _matched_at(issue, texts, frames)
        if position is None and issue.id in by_line:
            position = len(texts)
        if position is not None:
            rank = (issue.echo, position < first_related, -issue.specificity, issue.frame is None, position, order)
            found.append((rank, issue))
    return tuple(issue for _, issue in sorted(found, key=lambda pair: pair[0]))


def log_line_matcher(catalogue: Iterable[KnownIssue]) -> Callable[[str], tuple[KnownIssue, ...]]:
    """A function that takes a line and gives the entries that know their cause by it, the most specific first.

    Make it once and call it for every line of a log; nearly all of them are dismissed in a few microseconds.

    >>> entries_of = log_line_matcher(load_catalogue())
    >>> [issue.id for issue in entries_of("Out of memory: Killed process 4242 (python) total-vm:214748364kB")]
    ['host-oom-killed']
    """
    rules = [(word, issue.log_line, issue) for issue in catalogue if issue.log_line for word in issue.line_words]

    def entries_of(line: str) -> tuple[KnownIssue, ...]:
        hits = [(pattern, issue) for word, pattern, issue in rules if word in line]
        found = {issue.id: issue for pattern, issue in hits if pattern.search(line[:LINE_CHARS])}
        return tuple(sorted(found.values(), key=lambda issue: (issue.echo, -issue.specificity)))

    return entries_of


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


def _entry(entry: Any, where: str) -> KnownIssue:
    if not isinstance(entry, Mapping):
        raise _malformed(where, "it is no table", "write [[issue]] above its fields")
    where = f"{where} ({entry['id']})" if isinstance(entry.get("id"), str) else where
    _check_fields(entry, where)
    _check_clauses(entry, where)
    patterns = {name: _pattern(entry[name], name, where) for name in PATTERNS if name in entry}
    texts = {name: " ".join(entry.get(name, "").split()) for name in TEXTS}
    return KnownIssue(
        id=texts["id"],
        title=texts["title"],
        meaning=texts["meaning"],
        fix=texts["fix"],
        fixed_in=texts["fixed_in"],
        source=texts["source"],
        exception=patterns.get("exception"),
        frame=patterns.get("frame"),
        frame_free=texts["frame_free"],
        log_line=patterns.get("log_line"),
        line_words=_plain_words(entry.get("log_line", ""), where),
        refines=tuple(entry.get("refines", ())),
        echo=entry.get("echo", False),
    )


def _check_fields(entry: Mapping[str, Any], where: str) -> None:
    """Every field is known, present and of its type."""
    unknown = sorted(set(entry) - {*REQUIRED, *OPTIONAL})
    if unknown:
        raise _malformed(where, f"unknown field {unknown[0]!r}", f"the fields are {', '.join((*REQUIRED, *OPTIONAL))}")
    for name in REQUIRED:
        if name not in entry:
            raise _malformed(where, f"no field {name!r}", f"every entry has {', '.join(REQUIRED)}")
    for name, value in entry.items():
        if name == "refines":
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise _malformed(where, "'refines' is no list of ids", 'write refines = ["some-id"]')
        elif name == "echo":
            if not isinstance(value, bool):
                raise _malformed(where, "'echo' is neither true nor false", "write echo = true, or leave it out")
        elif not isinstance(value, str) or (not value.strip() and name != "fixed_in"):
            raise _malformed(where, f"{name!r} is empty or no string", "write a sentence, or leave the field out")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["id"]):
        raise _malformed(where, f"the id {entry['id']!r} is not kebab-case", "use lower-case words joined by '-'")


def _check_clauses(entry: Mapping[str, Any], where: str) -> None:
    """The rule is one that can be precise."""
    if "exception" not in entry and "log_line" not in entry:
        raise _malformed(where, "it has neither 'exception' nor 'log_line'", "say what is printed when it happens")
    if "exception" not in entry and ("frame" in entry or "frame_free" in entry):
        raise _malformed(where, "a frame without 'exception'", "add the exception that comes with it")
    if "exception" in entry and ("frame" in entry) == ("frame_free" in entry):
        raise _malformed(
            where,
            "it needs one of 'frame' and 'frame_free'",
            "name the frame it is raised through, or say in frame_free why the exception alone is decisive",
        )


def _pattern(text: str, name: str, where: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text, re.MULTILINE)
    except re.error as error:
        raise _malformed(where, f"{name!r} is no regular expression: {error}", "see Python's re syntax") from error
    if pattern.flags != re.compile("", re.MULTILINE).flags:
        raise _malformed(where, f"{name!r} sets flags", "spell out both cases: [Oo]ut of memory")
    # Note [Every repeat has an upper bound]: an unbounded one can take quadratic time, and nested ones exponential
    # time, on the text of a failure, which nobody controls.
    if re.search(r"[*+]|\{\d*,\}", _without_escapes_and_classes(text)):
        raise _malformed(
            where, f"{name!r} has a repeat without an upper bound", r"write .{0,200}, \d{1,20}, [\w.]{0,80}"
        )
    if pattern.search(""):
        raise _malformed(where, f"{name!r} matches everything", "write what is printed only when this happens")
    return pattern


def _plain_words(pattern: str, where: str) -> tuple[str, ...]:
    r"""For each alternative of a pattern, the longest text that every match of it holds.

    >>> _plain_words(r"[Oo]ut of memory: Killed process \d{1,9}|oom-kill( event)?:", "")
    ('ut of memory: Killed process ', 'oom-kill')
    """
    if not pattern:
        return ()
    fixed = _without_escapes_and_classes(pattern)
    while "(" in fixed:  # from the inside out; the pattern is valid, so they balance
        fixed = re.sub(r"\([^()]*\)", GAP, fixed)
    fixed = re.sub(r".(\?|\{[\d,]*\})", GAP, fixed)
    words = tuple(max(re.split(rf"[{GAP}.^$]", part), key=len) for part in fixed.split("|"))
    if any(len(word) < MIN_WORD for word in words):
        raise _malformed(where, "an alternative of 'log_line' has no plain words", "add words that do not vary")
    return words


def _without_escapes_and_classes(pattern: str) -> str:
    return re.sub(r"\[\^?\]?[^\]]*\]", GAP, re.sub(r"\\.", GAP, pattern, flags=re.DOTALL))


def _ranked(issues: Sequence[KnownIssue]) -> tuple[KnownIssue, ...]:
    """The same entries with their specificity; ids are unique and what they refine exists."""
    by_id: dict[str, KnownIssue] = {}
    for issue in issues:
        if issue.id in by_id:
            raise _malformed(issue.id, "two entries have this id", "choose another id for one of them")
        by_id[issue.id] = issue
    for issue in issues:
        for refined in issue.refines:
            if refined not in by_id:
                raise _malformed(issue.id, f"it refines {refined!r}, which does not exist", "name the id of an entry")
    depths: dict[str, int] = {}
    for issue in issues:
        _depth(issue.id, by_id, depths, ())
    return tuple(replace(issue, specificity=depths[issue.id]) for issue in issues)


def _depth(name: str, by_id: Mapping[str, KnownIssue], depths: dict[str, int], above: tuple[str, ...]) -> int:
    if name in above:
        raise _malformed(
            name, f"it refines itself: {' -> '.join((*above, name))}", "take one of these out of 'refines'"
        )
    if name not in depths:
        below = [_depth(refined, by_id, depths, (*above, name)) + 1 for refined in by_id[name].refines]
        depths[name] = max(below, default=0)
    return depths[name]


def _malformed(where: str, why: str, hint: str) -> ConfigError:
    return ConfigError("PG120", "a catalogue of known issues cannot be used", where=where, why=why, hint=hint)
