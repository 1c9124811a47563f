"""Lines that two processes tore apart or glued together, put right where only one reading is possible."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.syntax import FRAME, HEADER_TEXT, LINK_TEXTS

_BEGINNINGS = ("Traceback", "During h", "The abov")
_GLUED = re.compile(r'(?<=\S)(?=  File "[^"]+", line \d+, in \S)')
_HALF_PATH = re.compile(r'\bFile "[^"]*$')
_HALF_FRAME = re.compile(r'^\s*File "(?:[^"]*|[^"]+"(?:,(?: (?:l|li|lin|line|line \d*)?)?)?)$')
_WRAPPED_FRAME = re.compile(rf"^\s*File$|{_HALF_FRAME.pattern}")
_TWINS = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?P=type): : (?P<messages>.+)$")
_MIN_FRAGMENT = 8
_REACH = 6
_MIN_FOLD, _MAX_FOLD = 40, 250
_MAX_PIECES = 8
"""How many lines further down the other half may stand: other processes write in between."""


def folded_at(lines: Sequence[str]) -> int:
    """The width at which a terminal folded these lines, 0 if none did.

    Proven by at least two frames that break off inside of their path at the same width, which no line exceeds.
    """
    halves = Counter(len(line) for line in lines if 'File "' in line and _HALF_PATH.search(line))
    width, number = halves.most_common(1)[0] if halves else (0, 0)
    if number < 2 or not _MIN_FOLD <= width <= _MAX_FOLD or max(map(len, lines)) > width:
        return 0
    return width


def repair(lines: Sequence[Line]) -> list[Line]:
    """Split glued frames and join torn ones."""
    whole: list[Line] = []
    for line in lines:
        if _may_be_glued(line.text):
            whole += _unglue(line)
        else:
            whole.append(line)
    used: set[int] = set()
    for at, line in enumerate(whole):
        if at not in used and _may_be_half(line.text):
            other = _other_half(whole, at)
            if other is not None:
                used.add(other)
                whole[at] = line._replace(text=line.text + whole[other].text)
            elif pieces := _wrapped(whole, at):
                used.update(range(at + 1, at + pieces))
                whole[at] = line._replace(text=_joined(whole[at : at + pieces]))
    return [line for at, line in enumerate(whole) if at not in used] if used else whole


@lru_cache(maxsize=1 << 14)
def _may_be_glued(text: str) -> bool:
    """Cheaper than trying: whole lines, which repeat, are most of a log."""
    if 'File "' in text:
        return not FRAME.match(text)
    return HEADER_TEXT in text or " exception" in text or ": : " in text


def _may_be_half(text: str) -> bool:
    return text.startswith((*_BEGINNINGS, "  File", " File ", "File "))


def _unglue(line: Line) -> list[Line]:
    text = line.text
    if " exception" in text:
        link = next((words for words in LINK_TEXTS if text.endswith(words) and text != words), None)
        if link is not None:
            return [line._replace(text=text[: -len(link)]), line._replace(text=link)]
    if ": : " in text:
        return [line._replace(text=part) for part in _untwin(text)]
    if 'File "' not in text and HEADER_TEXT not in text:
        return [line]
    behind = text.find(HEADER_TEXT) + len(HEADER_TEXT)
    if behind >= len(HEADER_TEXT) and text[behind:].strip():
        return [line._replace(text=text[:behind]), *_unglue(line._replace(text=text[behind:]))]
    return [line._replace(text=part) for part in _GLUED.split(text)]


def _untwin(text: str) -> list[str]:
    """Two processes that wrote the same exception piece by piece: ``AErrorAError: : messagemessage``.

    >>> _untwin("ValueErrorValueError: : rank 1 failedrank 2 failed")
    ['ValueError: rank 1 failed', 'ValueError: rank 2 failed']
    """
    found = _TWINS.match(text)
    if found is None:
        return [text]
    both = found["messages"]
    for place in range(len(both) // 2 - 8, len(both) // 2 + 9):
        if 0 < place < len(both) and both[: min(4, place)] == both[place : place + min(4, place)]:
            return [f"{found['type']}: {both[:place]}", f"{found['type']}: {both[place:]}"]
    return [f"{found['type']}: {both}"]


def _other_half(lines: Sequence[Line], at: int) -> int | None:
    text = lines[at].text
    wanted = _missing_rest(text)
    if wanted is None and not _HALF_FRAME.match(text):
        return None
    for other in range(at + 1, min(at + 1 + _REACH, len(lines))):
        rest = lines[other].text
        if not rest.strip() or FRAME.match(rest):
            continue
        if rest.strip() == wanted or (wanted is None and FRAME.match(text + rest)):
            return other
    return None


def _wrapped(lines: Sequence[Line], at: int) -> int:
    """Over how many lines in a row a frame is wrapped, at spaces or inside of words; 0 if it is not."""
    if not _WRAPPED_FRAME.match(lines[at].text.rstrip()):
        return 0
    for pieces in range(2, _MAX_PIECES + 1):
        if at + pieces > len(lines) or 'File "' in lines[at + pieces - 1].text:
            return 0
        if FRAME.match(_joined(lines[at : at + pieces])):
            return pieces
    return 0


def _joined(lines: Sequence[Line]) -> str:
    """Pieces of a frame as one: a path has no spaces, what follows it has."""
    text = lines[0].text
    for line in lines[1:]:
        piece = line.text.strip()
        is_path = text.count('"') == 1
        text = text.rstrip() + ("" if is_path or piece.startswith(",") else " ") + piece
    return text


def _missing_rest(text: str) -> str | None:
    """What a line lacks to be one of the fixed sentences of a traceback."""
    if len(text) < _MIN_FRAGMENT or text[:1] not in "TD":
        return None
    for whole in (HEADER_TEXT, *LINK_TEXTS):
        if whole.startswith(text) and text != whole:
            return whole[len(text) :].strip()
    return None
