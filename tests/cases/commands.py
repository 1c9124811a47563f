"""Commands run as the shell would run them, in this process: importing torch takes longer than most of their tests."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from piecegraph.cli.main import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


class Terminal:
    """Somebody sits there; who reads waits for them."""

    def isatty(self) -> bool:
        return True


def runner(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with arguments, and what it reads; None: a terminal."""

    def run_command(*arguments: str, stdin: bytes | None = b"") -> Done:
        monkeypatch.setattr(sys, "argv", ["piecegraph", command, *arguments])
        monkeypatch.setattr(sys, "stdin", Terminal() if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run_command
