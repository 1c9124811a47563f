"""Telling the user's code from torch's and ours."""

from __future__ import annotations

import os
import sys
import traceback

from piecegraph.plan import SourceLine

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def is_user_file(file: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return f"{os.sep}torch{os.sep}" not in file and not file.startswith(_OWN_FOLDER) and not file.startswith("<")


def user_line(error: BaseException | None = None) -> SourceLine | None:
    """The innermost line of the user's code: of an error, or of the current call."""
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return SourceLine(frame.filename, frame.lineno or 0, frame.line or "")
    return None


def user_stack_level() -> int:
    """The ``stacklevel`` with which a warning raised by the caller points at the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level
