"""torchelastic's table of failures: the text of a ``ChildFailedError`` in, a row for each process out.

Ranks whose main function is recorded (``@record``) print no traceback of their own: it stands in the table alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from piecegraph.explain.evidence import Exit, Failure, Process, Raised
from piecegraph.explain.log.failures import find_failures
from piecegraph.explain.log.lines import Line
from piecegraph.explain.log.syntax import EXCEPTION_NAME, HEADER_TEXT, exception_of

_ROW = re.compile(
    r"host\s*:\s*(?P<host>\S*).*?rank\s*:\s*(?P<rank>\d+)\s*\(local_rank:\s*\d+\)"
    r".*?exitcode\s*:\s*(?P<code>-?\d+)\s*\(pid:\s*(?P<pid>\d+)\)"
    r"(?:[^\n]*\s*error_file\s*:[^\n]*\n\s*traceback ?: (?P<told>.*?)(?=\n\[\d+\]:\n|\n[-=]{8,}|\Z))?",
    re.DOTALL,
)
_FIRST = "Root Cause (first observed failure)"
_INDENT = "  "


@dataclass(frozen=True, slots=True)
class ElasticRow:
    """How a process ended, and what it had said of it."""

    ended: Exit
    failures: tuple[Failure, ...]


def rows_of_table(text: str, line: int | None) -> tuple[ElasticRow, ...]:
    """The rows, the first observed failure first.

    >>> row = "host: n1\\nrank: 3 (local_rank: 3)\\nexitcode: 1 (pid: 9)\\nerror_file: e\\ntraceback : ValueError: no"
    >>> [(row.ended.process.label, row.failures[0].chain[0].message) for row in rows_of_table(row, 7)]
    [('rank3', 'no')]
    """
    others, _, root = text.partition(_FIRST)
    found = [_read(row, line, is_first=True) for row in _ROW.finditer(root)]
    return (*found, *(_read(row, line, is_first=False) for row in _ROW.finditer(others)))


def _read(row: re.Match[str], line: int | None, *, is_first: bool) -> ElasticRow:
    who = Process(f"rank{row['rank']}", rank=int(row["rank"]), pid=int(row["pid"]), host=row["host"] or None)
    ended = Exit(process=who, code=int(row["code"]), is_first=is_first, line=line)
    # The exception's own excepthook and logger name the rank alone, and are to be found equal.
    return ElasticRow(ended, _failures(row["told"] or "", Process(who.label, rank=who.rank), line))


def _failures(told: str, who: Process, line: int | None) -> tuple[Failure, ...]:
    number = line or 0
    if told.startswith(HEADER_TEXT):
        lines = [Line(number, text.removeprefix(_INDENT)) for text in told.split("\n")]
        return find_failures(lines, who).failures
    read = exception_of(told.partition("\n")[0])
    if read is None or not read[1] or not EXCEPTION_NAME.search(read[0]):
        return ()
    return (Failure(chain=(Raised(type=read[0], message=read[1], frames=()),), processes=(who,), line=line),)
