"""What a launcher says about the processes it started: torchelastic's lines and its table of failures."""

from __future__ import annotations

import re

from piecegraph.explain.evidence import Exit, Process, signal_name

_ENTRY = re.compile(
    r"host\s*:\s*(?P<host>\S*).*?rank\s*:\s*(?P<rank>\d+)\s*\(local_rank:\s*(?P<local>\d+)\)"
    r".*?exitcode\s*:\s*(?P<code>-?\d+)\s*\(pid:\s*(?P<pid>\d+)\)",
    re.DOTALL,
)
_ROOT = "Root Cause (first observed failure)"
_LINE = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)")


def exits_of_table(text: str, line: int | None) -> tuple[Exit, ...]:
    """The rows of ``ChildFailedError``'s table, the first observed failure first."""
    others, _, root = text.partition(_ROOT)
    found = [_exit(row, line, is_first=True) for row in _ENTRY.finditer(root)]
    return (*found, *(_exit(row, line, is_first=False) for row in _ENTRY.finditer(others)))


def exit_of_line(text: str, line: int | None) -> Exit | None:
    """``failed (exitcode: -9) local_rank: 3 (pid: 1234) of binary: ...``."""
    found = _LINE.search(text)
    if found is None:
        return None
    return Exit(
        process=Process(f"local rank {found['local']}", pid=int(found["pid"])), code=int(found["code"]), line=line
    )


def describe_code(code: int) -> str:
    """An exit code in words.

    >>> describe_code(-9)
    'killed by SIGKILL'
    >>> describe_code(1)
    'exit code 1'
    """
    if code >= 0:
        return f"exit code {code}"
    return f"killed by {signal_name(-code)}"


def _exit(row: re.Match[str], line: int | None, *, is_first: bool) -> Exit:
    who = Process(f"rank{row['rank']}", rank=int(row["rank"]), pid=int(row["pid"]), host=row["host"] or None)
    return Exit(process=who, code=int(row["code"]), is_first=is_first, line=line)
