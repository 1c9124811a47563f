"""The regular expressions of known issues: their text in, a pattern out, or the reason why it cannot be used.

A pattern is searched in what nobody controls, a log of any size, so one that could take long is refused when it is
read. See Note [Patterns that take no long time].
"""

from __future__ import annotations

import re

MAX_READINGS = 10**7
MIN_WORD = 6
GAP = "\x00"
"""Stands for what varies in a pattern."""

_TOKEN = re.compile(r"\((?:\?(?:P<\w+>|<?[=!]|:))?|\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\}|\?|.", re.DOTALL)


class PatternError(ValueError):
    """A pattern that is refused: why, and what to write instead."""

    def __init__(self, why: str, hint: str) -> None:
        self.why, self.hint = why, hint
        super().__init__(why)


def compile_pattern(text: str) -> re.Pattern[str]:
    r"""A pattern that is searched with ``^`` and ``$`` at each line. Raises :class:`PatternError`.

    >>> compile_pattern(r"rank \d{1,6} is gone$").search("x\nrank 12 is gone\ny").group()
    'rank 12 is gone'
    """
    try:
        pattern = re.compile(text, re.MULTILINE)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"is no regular expression: {error}", "see Python's re syntax") from error
    if pattern.flags != re.compile("", re.MULTILINE).flags:
        raise PatternError("sets flags", "spell out both cases: [Oo]ut of memory")
    _check_cost(text)
    if pattern.search(""):
        raise PatternError("matches everything", "write what is printed only when this happens")
    return pattern


def _check_cost(text: str) -> None:
    """Note [Patterns that take no long time].

    Without an upper bound a repeat can take quadratic time on the text of a failure. With one, a repeat inside of a
    repeat can still take exponential time, and many in a row a power of it. So the ways in which the repeats of a
    pattern can be read are counted, at their worst, and a pattern with too many is refused.
    """
    fixed = _without_escapes_and_classes(text)
    if re.search(r"[*+]|\{\d*,\}", fixed):
        raise PatternError("has a repeat without an upper bound", r"write .{0,200}, \d{1,20}, [\w.]{0,80}")
    if num_readings(text) > MAX_READINGS:
        raise PatternError("could take hours: repeats inside of repeats, or too many", "use fewer and shorter repeats")


def num_readings(pattern: str) -> int:
    r"""In how many ways the repeats of a valid pattern can be read, at most; a large number stands for all larger ones.

    >>> num_readings(r"a{2}b{0,3}c?|d"), num_readings(r"(x{1,9}){1,9}y") > 10**9
    (9, True)
    """
    total, product, last = 0, 1, 1
    outer: list[tuple[int, int]] = []
    was_repeat = False
    for token in _TOKEN.finditer(_without_escapes_and_classes(pattern)):
        sign, is_repeat = token[0], False
        if sign[0] == "(":
            outer.append((total, product))
            total, product, last = 0, 1, 1
        elif sign == ")":
            last = total + product
            total, product = outer.pop()
            product *= last
        elif sign == "|":
            total, product, last = total + product, 1, 1
        elif sign == "?" and was_repeat:
            pass  # it makes the repeat before it a lazy one
        elif sign == "?" or token["low"] or token["comma"]:
            low, high = (0, 1) if sign == "?" else _bounds(token)
            product = min(product // last * min(last**high, 10**30) * (high - low + 1), 10**30)
            last, is_repeat = 1, True
        else:
            last = 1
        was_repeat = is_repeat
    return total + product


def _bounds(token: re.Match[str]) -> tuple[int, int]:
    low = int(token["low"] or 0)
    return low, int(token["high"] or low) if token["comma"] else low


def plain_words(pattern: str) -> tuple[str, ...]:
    r"""For each alternative of a valid pattern, the longest text that every match of it holds.

    >>> plain_words(r"[Oo]ut of memory: Killed process \d{1,9}|oom-kill( event)?:")
    ('ut of memory: Killed process ', 'oom-kill')
    """
    fixed = _without_escapes_and_classes(pattern)
    while "(" in fixed:  # from the inside out; the pattern is valid, so they balance
        fixed = re.sub(r"\([^()]*\)", GAP, fixed)
    fixed = re.sub(r".(\?|\{[\d,]*\})", GAP, fixed)
    words = tuple(max(re.split(rf"[{GAP}.^$]", part), key=len) for part in fixed.split("|"))
    if any(len(word) < MIN_WORD for word in words):
        raise PatternError("has an alternative with no plain words", f"add words of {MIN_WORD} letters that never vary")
    return words


def _without_escapes_and_classes(pattern: str) -> str:
    return re.sub(r"\[\^?\]?[^\]]*\]", GAP, re.sub(r"\\.", GAP, pattern, flags=re.DOTALL))
