"""Telling the user's code from torch's and ours."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import traceback
from types import CodeType, FrameType

from piecegraph.base.plan import SourceLine

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@functools.cache
def _torch_folders() -> tuple[str, ...]:
    """Where torch lies, found without importing it. A folder called ``torch`` may be anything else, too."""
    spec = importlib.util.find_spec("torch")
    return tuple(folder + os.sep for folder in (spec.submodule_search_locations or ())) if spec is not None else ()


def is_user_file(file: str) -> bool:
    """Whether a file is neither torch's, nor ours, nor written by a compiler.

    >>> is_user_file("/home/me/model.py"), is_user_file("/tmp/torchinductor_me/ab/cabc.py"), is_user_file("<eval>")
    (True, False, False)
    """
    return not file.startswith("<") and not is_torchs_or_ours(file) and not _is_generated(file)


def is_torchs_or_ours(file: str) -> bool:
    """Whether a file is part of torch or of piecegraph."""
    return file.startswith((_OWN_FOLDER, *_torch_folders()))


_generated: list[str] = []
"""Folders that code was written into by this process."""


def note_generated(folder: str) -> None:
    """What lies in a folder was written by us."""
    _generated.append(folder + os.sep)


def _is_generated(file: str) -> bool:
    """Whether Inductor or we wrote it. Inductor's folder is found without torch, which a reader of traces need not
    have.
    """
    if file.startswith(tuple(_generated)):
        return True
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return f"{os.sep}torchinductor_" in file or (bool(folder) and file.startswith(f"{folder}{os.sep}"))


def user_line(error: BaseException | None = None) -> SourceLine | None:
    """The innermost line of the user's code: of an error, or of the current call."""
    frames = traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return SourceLine(frame.filename, frame.lineno or 0, frame.line or "")
    return None


def caller() -> CodeType | None:
    """The innermost function on the stack that is not ours: who makes the call that one of our modes is shown."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_FOLDER):
        frame = frame.f_back
    return None if frame is None else frame.f_code


def user_stack_level() -> int:
    """The ``stacklevel`` with which a warning raised by the caller points at the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_user_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level
