"""A file of known issues, tried out: every entry is read, and its own examples are explained as logs are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from piecegraph.base.text import count_of
from piecegraph.errors import ConfigError, PiecegraphError
from piecegraph.explain.catalogue import load_catalogue, parse_entries, read_file
from piecegraph.explain.from_logs import explain_text
from piecegraph.explain.known_issues import KnownIssue


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """What came of a file of known issues."""

    entries: tuple[str, ...]
    """A line for each entry that can be used."""
    problems: tuple[str, ...]
    """What must be mended."""


def check_file(path: Path, others: Iterable[Path] = ()) -> CheckedFile:
    """Try out a file of known issues.

    Args:
        path: the file.
        others: files of known issues that are used beside it: ids are unique among all of them.
    """
    try:
        issues, errors = parse_entries(read_file(path), str(path))
        catalogue = load_catalogue([*others, path]) if not errors else ()
    except ConfigError as error:
        return CheckedFile((), (str(error),))
    if errors:
        return CheckedFile(tuple(issue.id for issue in issues), tuple(map(str, errors)))
    problems = [problem for issue in issues for problem in _problems_of(issue, catalogue)]
    return CheckedFile(tuple(map(_summary, issues)), tuple(problems))


def _problems_of(issue: KnownIssue, catalogue: Sequence[KnownIssue]) -> Iterable[str]:
    for number, text in enumerate(issue.examples, 1):
        found = _named(text, catalogue)
        if issue.id not in found:
            yield f"{issue.defined_at} ({issue.id}): example {number} is not recognised{_instead(found)}"
    for number, text in enumerate(issue.counter_examples, 1):
        if issue.id in _named(text, catalogue):
            yield f"{issue.defined_at} ({issue.id}): counter-example {number} is taken for it"


def _named(text: str, catalogue: Sequence[KnownIssue]) -> tuple[str, ...]:
    """The entries that a page about this log names."""
    try:
        return tuple(known.id for known in explain_text(text, catalogue).known)
    except PiecegraphError as error:  # no text, say
        return (str(error),)


def _instead(found: Sequence[str]) -> str:
    return f", but {', '.join(found)}" if found else ""


def _summary(issue: KnownIssue) -> str:
    tried = [
        count_of(len(texts), name)
        for texts, name in ((issue.examples, "example"), (issue.counter_examples, "counter-example"))
        if texts
    ]
    return f"{issue.id}: {' and '.join(tried) if tried else 'no examples'}"
