"""A linker that is quick with large libraries, for the kernels that tests compile."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

FOLDERS = "COMPILER_PATH"
"""Where gcc looks for a linker first."""


def link_quickly() -> None:
    """Have gold link, where it is installed: each kernel is linked with all of torch, whose names it reads in a third
    of the time. That is a fifth of a second for each of some hundred kernels.
    """
    gold = shutil.which("ld.gold")
    if gold is None or FOLDERS in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"piecegraph_tests_linker_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another worker's, or of an earlier run
        (folder / "ld").symlink_to(gold)
    os.environ[FOLDERS] = str(folder)
