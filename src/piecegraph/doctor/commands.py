"""Running other programs with a time limit. One that is missing, fails or hangs is a result here, never an error."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OF_LOADER = re.compile(
    r"^ERROR: ld\.so: object '(?P<object>[^']+)' .*?cannot be preloaded(?: \((?P<why>.*?)\))?.*\n?", re.M
)
"""What the loader prints for LD_PRELOAD in the name of every program; none of them says it."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a program said."""

    out: str = ""
    err: str = ""
    code: int | None = None
    """``None`` where it did not end by itself; negative for a signal."""
    trouble: str = ""
    """Why the output is not to be relied on; empty if it is."""
    refused: tuple[str, ...] = ()
    """The libraries of LD_PRELOAD that the loader would not load for it, with the reason."""


@dataclass(frozen=True, slots=True)
class Shell:
    """The environment in which programs are looked up and run."""

    environ: Mapping[str, str]
    limit_s: float

    def find(self, name: str) -> str:
        """The path of a program, empty if there is none."""
        return shutil.which(name, path=self.environ.get("PATH", os.defpath)) or ""

    def _environ_of_programs(self) -> dict[str, str]:
        """Without a TMPDIR that is not there, which is told once, and not by every program that fails for it."""
        environ = dict(self.environ)
        if not os.path.isdir(environ.get("TMPDIR", "/")):
            del environ["TMPDIR"]
        return environ

    def run(self, command: Sequence[str], limit_s: float | None = None) -> CommandResult:
        """Run a program to its end, or to the end of its time."""
        limit_s = limit_s or self.limit_s
        try:
            process = subprocess.Popen(
                command,
                env=self._environ_of_programs(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return CommandResult(trouble=f"cannot be run: {error.strerror or error}")
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            out, err = _end(process)
            return CommandResult(out, err, None, f"did not end within {limit_s:g} s")
        refused = tuple(f"{one['object']}: {one['why'] or 'cannot be loaded'}" for one in _OF_LOADER.finditer(err))
        err = _OF_LOADER.sub("", err)
        trouble = "" if process.returncode == 0 else _failure(process.returncode, out + err)
        return CommandResult(out, err, process.returncode, trouble, tuple(dict.fromkeys(refused)))


def refused_preloads(shell: Shell) -> tuple[str, ...]:
    """The libraries of LD_PRELOAD that cannot be loaded, with the reason."""
    return shell.run(["true"]).refused if shell.environ.get("LD_PRELOAD") else ()


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    # The whole session: a child of a wrapper script would keep the pipes open and this process waiting.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=5)
    except subprocess.TimeoutExpired:  # stuck in the driver: not even SIGKILL ends it
        return "", ""


def _failure(code: int, text: str) -> str:
    if code < 0:
        try:
            return f"died of {signal.Signals(-code).name}"
        except ValueError:
            return f"died of signal {-code}"
    lines = text.strip().splitlines()
    return f"failed with code {code}: {lines[-1].strip()[:200]}" if lines else f"failed with code {code}"
