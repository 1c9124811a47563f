"""Where in the user's model Python is right now: the lines, and the module.

A module's path is read off the stack: torch runs every module through one function, so the frames of that function
name the modules under way, and the outermost one gives the others their names. Nothing has to be hooked.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import CodeType, FrameType

import torch

from piecegraph.base import torch_compat
from piecegraph.base.origin import Origin
from piecegraph.base.plan import SourceLine
from piecegraph.base.user_code import is_user_file

_MODULE_CALL = torch_compat.module_call_code()
_COMMANDS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cli") + os.sep

_lines: dict[tuple[CodeType, int], SourceLine | None] = {}
_paths: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
_strangers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[torch.nn.Module]] = weakref.WeakKeyDictionary()
"""Modules that are called inside of others without being parts of them: to look for these at every op takes long."""

_root: ContextVar[torch.nn.Module | None] = ContextVar("piecegraph_root_module", default=None)
_outside: ContextVar[FrameType | None] = ContextVar("piecegraph_outside", default=None)
"""The frame at which stacks end."""


@contextlib.contextmanager
def paths_from(root: torch.nn.Module | None) -> Iterator[None]:
    """Inside, paths of modules start from this one: its own ``forward`` may be called without being on the stack."""
    token = _root.set(root)
    try:
        yield
    finally:
        _root.reset(token)


@contextlib.contextmanager
def stacks_from_here() -> Iterator[None]:
    """Inside, stacks start from here: who had a graph captured, or run again, says nothing of what is in it."""
    token = _outside.set(sys._getframe(2))  # of the with statement, behind this function and its decorator
    try:
        yield
    finally:
        _outside.reset(token)


def current_origin(op: str) -> Origin:
    """The place that the caller's stack stands for."""
    frames = list(_frames())
    lines = [line for frame in frames if (line := _user_line(frame)) is not None]
    return Origin(op, path_of(_modules(frames), _root.get()), tuple(reversed(lines)))


def current_path() -> str:
    """The path of the module whose ``forward`` is running in this thread."""
    return path_of(calling_modules(), _root.get())


def calling_modules() -> list[torch.nn.Module]:
    """The modules whose ``forward`` is running in this thread, outermost first.

    Asked at every op: this is :func:`_frames` without a generator.
    """
    found = []
    frame: FrameType | None = sys._getframe(1)
    outside = _outside.get()
    while frame is not None and frame is not outside:
        code = frame.f_code
        if code is _MODULE_CALL:
            found.append(frame.f_locals["self"])
        elif code.co_filename.startswith(_COMMANDS):
            break
        frame = frame.f_back
    found.reverse()
    return found


def path_of(calling: Sequence[torch.nn.Module], root: torch.nn.Module | None) -> str:
    """The path of the innermost of the modules that are being called; empty outside of any module.

    Args:
        calling: outermost first.
        root: where the path starts; None for the outermost of them.
    """
    root = root if root is not None else next(iter(calling), None)
    if root is None:
        return ""
    names, strangers = _paths.setdefault(root, {}), _strangers.setdefault(root, weakref.WeakSet())
    if any(not _is_at(root, names.get(id(module)), module) and module not in strangers for module in calling):
        names = _paths[root] = {id(part): name for name, part in root.named_modules()}
        strangers.update(module for module in calling if id(module) not in names)
    return next((names[id(module)] for module in reversed(calling) if id(module) in names), "")


def _is_at(root: torch.nn.Module, path: str | None, module: torch.nn.Module) -> bool:
    """Whether a module still has its name: parts come and go, and a new one may even have the id of one that went."""
    part: torch.nn.Module | None = root
    for name in path.split(".") if path else ():
        part = part._modules.get(name) if part is not None else None
    return path is not None and part is module


def _frames() -> Iterator[FrameType]:
    """Innermost first, without those of this file, and without what started one of our commands."""
    frame: FrameType | None = sys._getframe(2)
    outside = _outside.get()
    while frame is not None and frame is not outside and not frame.f_code.co_filename.startswith(_COMMANDS):
        yield frame
        frame = frame.f_back


def _modules(frames: Sequence[FrameType]) -> list[torch.nn.Module]:
    return [frame.f_locals["self"] for frame in reversed(frames) if frame.f_code is _MODULE_CALL]


def _user_line(frame: FrameType) -> SourceLine | None:
    key = (frame.f_code, frame.f_lineno)
    if key not in _lines:
        file, number = key[0].co_filename, frame.f_lineno or 0  # some instructions belong to no line
        is_user = is_user_file(file)
        _lines[key] = SourceLine(file, number, linecache.getline(file, number).strip()) if is_user else None
    return _lines[key]
