"""Names of source files that hold wherever an environment or a project lies: below a folder of ``sys.path``.

What is kept of a trace names the files of its lines, and the code it was made of. Another machine of the same kind, or
another environment with the same packages, has the same files in other folders.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import types
from typing import Any

_FILE = re.compile(r'(?<=File ")[^"\n]+(?=")')


def file_of(module: Any) -> str | None:
    """The file of what is in ``sys.modules``, which is not asked for it: some import others when they are asked."""
    found = vars(module).get("__file__") if issubclass(type(module), types.ModuleType) else None
    return found if type(found) is str else None


def portable_name(file: str) -> str:
    """A file by its place below a folder that modules are found in; as it is, if it is in none."""
    return _portable_name(file, tuple(sys.path))


@functools.lru_cache(maxsize=4096)
def _portable_name(file: str, folders: tuple[str, ...]) -> str:
    roots = (os.path.join(os.path.abspath(folder), "") for folder in folders)
    longest = max((root for root in roots if file.startswith(root)), key=len, default="")
    return file[len(longest) :]


@functools.lru_cache(maxsize=4096)
def _found(name: str, folders: tuple[str, ...]) -> str:
    """The file of a portable name here; the name, if there is none."""
    if os.path.isabs(name) or name.startswith("<"):
        return name
    paths = (os.path.join(os.path.abspath(folder), name) for folder in folders)
    return next(filter(os.path.exists, paths), name)


def with_portable_names(stack: str) -> str:
    """The text of a stack, for another process."""
    return _FILE.sub(lambda match: portable_name(match[0]), stack)


def with_files_here(stack: str) -> str:
    """The same with the files of this process."""
    return _with_files_in(stack, tuple(sys.path))


@functools.lru_cache(maxsize=1024)
def _with_files_in(stack: str, folders: tuple[str, ...]) -> str:
    """A graph of equal layers has the same few stacks hundreds of times."""
    return _FILE.sub(lambda match: _found(match[0], folders), stack)
