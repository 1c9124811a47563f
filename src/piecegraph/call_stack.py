"""Where in the user's model Python is right now: the lines, and the module.

A module's path is read off the stack: torch runs every module through ``Module._call_impl``, so the frames of that
function name the modules under way, and the outermost one gives the others their names. Nothing has to be hooked.
"""

from __future__ import annotations

import linecache
import sys
import weakref
from types import CodeType, FrameType

import torch

from piecegraph.origin import Origin
from piecegraph.plan import SourceLine
from piecegraph.user_code import is_user_file

_CALL_MODULE = torch.nn.Module._call_impl.__code__

_lines: dict[tuple[CodeType, int], SourceLine | None] = {}
_paths: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def current_origin(op: str) -> Origin:
    """The place that the caller's stack stands for."""
    lines: list[SourceLine] = []
    modules: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL_MODULE:
            modules.append(frame.f_locals["self"])
        elif (line := _user_line(frame)) is not None:
            lines.append(line)
        frame = frame.f_back
    return Origin(op, _path(modules[0], modules[-1]) if modules else "", tuple(reversed(lines)))


def _user_line(frame: FrameType) -> SourceLine | None:
    key = (frame.f_code, frame.f_lineno)
    if key not in _lines:
        file = frame.f_code.co_filename
        text = linecache.getline(file, frame.f_lineno).strip()
        _lines[key] = SourceLine(file, frame.f_lineno, text) if is_user_file(file) else None
    return _lines[key]


def _path(module: torch.nn.Module, root: torch.nn.Module) -> str:
    names = _paths.get(root)
    if names is None or id(module) not in names:  # a new root, or one that has got new parts
        names = _paths[root] = {id(part): name for name, part in root.named_modules()}
    return names.get(id(module), type(module).__name__)
