"""Files of known issues: TOML in, entries out that can be matched, or an error that names the place and the reason."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from piecegraph.errors import ConfigError
from piecegraph.explain.known_issues import KnownIssue
from piecegraph.explain.patterns import PatternError, compile_pattern, plain_words

REQUIRED = ("id", "title", "meaning", "fix", "source")
PATTERNS = ("exception", "frame", "log_line")
TEXTS = (*REQUIRED, "frame_free", "fixed_in")
LISTS = ("refines", "examples", "counter_examples")
FIELDS = (*REQUIRED, *PATTERNS, "frame_free", "fixed_in", *LISTS, "echo")

_Result = TypeVar("_Result")
_STRINGS_AND_COMMENTS = re.compile(
    r'"""(?:\\.|[^\\])*?"""' r"|'''.*?'''" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'" r"|#[^\n]*", re.DOTALL
)


def load_catalogue(extra: Iterable[Path] = ()) -> tuple[KnownIssue, ...]:
    """The entries that come with piecegraph, and those of further files. Raises ``ConfigError``.

    >>> len(load_catalogue()) >= 30
    True
    """
    shipped = files("piecegraph.explain").joinpath("known_issues.toml")
    issues = parse_catalogue(shipped.read_text(encoding="utf-8"), "known_issues.toml")
    for path in dict.fromkeys(path.resolve() for path in extra):
        issues += parse_catalogue(read_file(path), str(path))
    return _ranked(issues)


def files_of_folder(folder: Path) -> tuple[Path, ...]:
    """The files of known issues that a user keeps; none where there is no such folder."""
    return tuple(sorted(folder.glob("*.toml")))


def read_file(path: Path) -> str:
    """The text of a file of known issues."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _malformed(str(path), why, "give the path of a TOML file in UTF-8") from error


def parse_catalogue(text: str, name: str) -> tuple[KnownIssue, ...]:
    """The entries of one file. What they refine may be in another."""
    issues, errors = parse_entries(text, name)
    if errors:
        raise errors[0]
    return issues


def parse_entries(text: str, name: str) -> tuple[tuple[KnownIssue, ...], tuple[ConfigError, ...]]:
    """The entries of one file that are well-formed, and what is wrong with the others, an error for each."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        return (), (_malformed(name, str(error), "write TOML: one [[issue]] table for each entry"),)
    entries = document.pop("issue", [])
    if document or not isinstance(entries, list):
        odd = ", ".join(map(repr, document)) or "'issue', which is no list of tables"
        return (), (_malformed(name, f"it holds {odd}", "one [[issue]] table for each entry, and nothing else"),)
    lines = field_lines(text)
    known_lines = lines if len(lines) == len(entries) else ({},) * len(entries)
    issues, errors = [], []
    for number, (entry, own_lines) in enumerate(zip(entries, known_lines, strict=True), 1):
        try:
            issues.append(_entry(entry, _Place(name, number, own_lines)))
        except ConfigError as error:
            errors.append(error)
    return tuple(issues), tuple(errors)


def field_lines(text: str) -> tuple[Mapping[str, int], ...]:
    """For each ``[[issue]]`` of a valid TOML text the lines of its fields, and under ``""`` its own.

    >>> field_lines("# ours\\n[[issue]]\\nid = 'a'\\nfix = '''\\nid = 3\\n'''\\n")
    ({'': 2, 'id': 3, 'fix': 4},)
    """
    bare = _STRINGS_AND_COMMENTS.sub(lambda found: "\n" * found[0].count("\n"), text)
    entries: list[dict[str, int]] = []
    for number, line in enumerate(bare.split("\n"), 1):
        if re.match(r"\s*\[\[\s*issue\s*\]\]", line):
            entries.append({"": number})
        elif entries and (field := re.match(r"\s*([\w-]+)\s*=", line)):
            entries[-1].setdefault(field[1], number)
    return tuple(entries)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an entry stands."""

    file: str
    number: int
    lines: Mapping[str, int]
    id: str = ""

    def malformed(self, field: str, why: str, hint: str) -> ConfigError:
        line = self.lines.get(field, self.lines.get(""))
        named = f" ({self.id})" if self.id else ""
        at = f"{self.file}{f', line {line}' if line else ''}, entry {self.number}{named}"
        return _malformed(at, why, hint)


def _entry(entry: Any, place: _Place) -> KnownIssue:
    if not isinstance(entry, Mapping):
        raise place.malformed("", "it is no table", "write [[issue]] above its fields")
    place = replace(place, id=entry["id"]) if isinstance(entry.get("id"), str) else place
    _check_fields(entry, place)
    _check_clauses(entry, place)
    patterns = {name: _checked(compile_pattern, name, entry, place) for name in PATTERNS if name in entry}
    texts = {name: " ".join(entry.get(name, "").split()) for name in TEXTS}
    line = place.lines.get("")
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
        line_words=_checked(plain_words, "log_line", entry, place) if "log_line" in entry else (),
        refines=tuple(entry.get("refines", ())),
        echo=entry.get("echo", False),
        examples=tuple(entry.get("examples", ())),
        counter_examples=tuple(entry.get("counter_examples", ())),
        defined_at=f"{place.file}{f', line {line}' if line else ''}",
    )


def _checked(read: Callable[[str], _Result], name: str, entry: Mapping[str, Any], place: _Place) -> _Result:
    try:
        return read(entry[name])
    except PatternError as error:
        raise place.malformed(name, f"{name!r} {error.why}", error.hint) from error


def _check_fields(entry: Mapping[str, Any], place: _Place) -> None:
    """Every field is known, present and of its type."""
    for name in entry:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(FIELDS)}"
            raise place.malformed(name, f"unknown field {name!r}", hint)
    for name in REQUIRED:
        if name not in entry:
            raise place.malformed("", f"no field {name!r}", f"every entry has {', '.join(REQUIRED)}")
    for name, value in entry.items():
        if name in LISTS:
            if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
                what = "ids" if name == "refines" else "texts"
                raise place.malformed(name, f"{name!r} is no list of {what}", f'write {name} = ["...", "..."]')
        elif name == "echo":
            if not isinstance(value, bool):
                raise place.malformed(name, "'echo' is neither true nor false", "write echo = true, or leave it out")
        elif not isinstance(value, str) or (not value.strip() and name != "fixed_in"):
            raise place.malformed(name, f"{name!r} is empty or no string", "write a sentence, or leave the field out")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["id"]):
        raise place.malformed("id", f"the id {entry['id']!r} is not kebab-case", "use lower-case words joined by '-'")


def _check_clauses(entry: Mapping[str, Any], place: _Place) -> None:
    """The rule is one that can be precise."""
    if "exception" not in entry and "log_line" not in entry:
        raise place.malformed("", "it has neither 'exception' nor 'log_line'", "say what is printed when it happens")
    if "exception" not in entry and ("frame" in entry or "frame_free" in entry):
        raise place.malformed("", "a frame without 'exception'", "add the exception that comes with it")
    if "exception" in entry and ("frame" in entry) == ("frame_free" in entry):
        raise place.malformed(
            "exception",
            "it needs one of 'frame' and 'frame_free'",
            "name the frame it is raised through, or say in frame_free why the exception alone is decisive",
        )


def _ranked(issues: Sequence[KnownIssue]) -> tuple[KnownIssue, ...]:
    """The same entries with their specificity; ids are unique and what they refine exists."""
    by_id: dict[str, KnownIssue] = {}
    for issue in issues:
        if issue.id in by_id:
            why = f"the id {issue.id!r} is taken, by {by_id[issue.id].defined_at}"
            raise _malformed(issue.defined_at, why, "choose another id; to be named before that one, refine it")
        by_id[issue.id] = issue
    for issue in issues:
        for refined in issue.refines:
            if refined not in by_id:
                near = difflib.get_close_matches(refined, by_id, 1)
                hint = f"did you mean {near[0]!r}?" if near else "name the id of an entry: explain --list"
                raise _malformed(issue.defined_at, f"{issue.id!r} refines {refined!r}, which does not exist", hint)
    depths: dict[str, int] = {}
    for issue in issues:
        _depth(issue.id, by_id, depths, ())
    return tuple(replace(issue, specificity=depths[issue.id]) for issue in issues)


def _depth(name: str, by_id: Mapping[str, KnownIssue], depths: dict[str, int], above: tuple[str, ...]) -> int:
    if name in above:
        circle = " -> ".join((*above, name))
        raise _malformed(by_id[name].defined_at, f"it refines itself: {circle}", "take one of these out of 'refines'")
    if name not in depths:
        below = [_depth(refined, by_id, depths, (*above, name)) + 1 for refined in by_id[name].refines]
        depths[name] = max(below, default=0)
    return depths[name]


def _malformed(where: str, why: str, hint: str) -> ConfigError:
    return ConfigError("PG120", "a catalogue of known issues cannot be used", where=where, why=why, hint=hint)
