"""The stacks that ``faulthandler`` writes: text in, the stacks of a process out."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

from piecegraph.explain.evidence import Frame

_FATAL = re.compile(r"^Fatal Python error: (.+)$")
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*most recent call first")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, slots=True)
class StackDump:
    """What one signal wrote."""

    fatal: str
    """``Segmentation fault``; empty for stacks that were asked for."""
    frames: tuple[Frame, ...]
    """Of the thread that was hit, outermost first; of the main thread where none was."""
    num_threads: int


def last_dump(text: str) -> StackDump | None:
    """The last complete dump of a file that dumps were appended to.

    >>> last_dump('Current thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n').frames
    (Frame(file='a.py', line=3, function='f', source=''),)
    """
    fatal, before = "", ""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if found := _FATAL.match(line):
            fatal, threads = found[1], []
        elif found := _THREAD.match(line):
            if before:  # the threads of one dump are apart: here the next dump begins
                fatal, threads = "", []
            threads.append((found[1] == "Current thread", []))
        elif (found := _FRAME.match(line)) and threads:
            file, number = found[1], int(found[2])
            threads[-1][1].append(Frame(file, number, found[3], linecache.getline(file, number).strip()))
        before = line
    if not threads:
        return StackDump(fatal, (), 0) if fatal else None
    frames = next((frames for current, frames in threads if current), threads[-1][1])
    return StackDump(fatal, tuple(reversed(frames)), len(threads))
