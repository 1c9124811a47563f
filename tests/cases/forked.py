"""Programs in processes that have torch and transformers imported already: forked from one that did nothing else.

Importing takes longer than most of the programs that the docs show. Nothing of piecegraph and of its tests is imported
beforehand, so a program pays for, and sees, all that piecegraph does when it is imported and run; what it leaves behind
ends with its process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

_IMPORTED = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "transformers.modeling_utils",
    "transformers.models.qwen3_next.modeling_qwen3_next",
    "rich.console",
    "sympy.tensor.tensor",
    "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension",
)


@dataclass(frozen=True)
class Program:
    """What follows ``python`` on a command line, and where it runs."""

    words: tuple[str, ...]
    """``-c CODE ...`` or ``FILE ...``."""
    environment: dict[str, str]
    cwd: str
    seconds: int
    """After which it is killed."""
    out: str
    err: str

    def become(self) -> None:
        """Run as the program, in a process that was forked for it."""
        signal.alarm(self.seconds)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environment)
        for path, number in ((os.devnull, 0), (self.out, 1), (self.err, 2)):
            file = os.open(path, os.O_RDWR | os.O_CREAT)
            os.dup2(file, number)
            os.close(file)
        first, *rest = self.words
        if first == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), vars(module))
        else:
            sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
            runpy.run_path(first, run_name="__main__")


class Running:
    """A program that was forked."""

    def __init__(self, pid: int, out: Path, err: Path, told: TextIO) -> None:
        self.pid = pid
        self._out = out
        self._err = err
        self._told = told
        self._code: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    @property
    def out(self) -> str:
        """What it has printed until now."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """The same of its standard error."""
        return self._err.read_text()

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        if self._code is None:
            self._code = int(self._told.readline())
        return self._code


class ForkServer:
    """The process that programs are forked from, one after the other."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server = server
        self._folder = folder

    def start(self, *words: str, cwd: Path, seconds: int = 300, environment: dict[str, str] | None = None) -> Running:
        """As ``subprocess.Popen`` of Python with these words. It must have ended before the next is started."""
        out, err = self._folder / "out", self._folder / "err"
        for path in (out, err):
            path.write_text("")
        program = Program(words, environment or dict(os.environ), str(cwd), seconds, str(out), str(err))
        told = self._server.stdout
        assert self._server.stdin is not None
        assert told is not None
        print(json.dumps(asdict(program)), file=self._server.stdin, flush=True)
        return Running(int(told.readline()), out, err, told)

    def run(
        self, *words: str, cwd: Path, seconds: int = 300, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run`` of Python with these words."""
        program = self.start(*words, cwd=cwd, seconds=seconds, environment=environment)
        return subprocess.CompletedProcess(words, program.wait(), program.out, program.err)


@contextlib.contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Start one; it ends when its input does."""
    pipe = subprocess.PIPE
    command = [sys.executable, __file__]
    with TemporaryDirectory() as folder, subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as it:
        yield ForkServer(it, Path(folder))
        assert it.stdin is not None
        it.stdin.close()


def _serve() -> None:
    """Fork for each program that is asked for. Returns in the forked processes."""
    gc.disable()  # what is imported stays
    for name in _IMPORTED:
        importlib.import_module(name)
    _hash_compilers()
    gc.enable()
    gc.freeze()  # a collection would write to, and so copy, the pages of everything that was imported
    for line in sys.stdin:
        child = os.fork()
        if not child:
            Program(**json.loads(line)).become()
            return
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _hash_compilers() -> None:
    """Inductor reads all of its own files, and Triton's, before it first compiles, and remembers what they hash to."""
    from torch._inductor import codecache
    from torch._inductor.runtime import triton_compat

    codecache.torch_key()
    if triton_compat.HAS_TRITON:
        triton_compat.triton_key()


if __name__ == "__main__":
    _serve()
