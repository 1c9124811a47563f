"""Programs in processes that have torch and transformers imported already: forked from one that did nothing else.

Importing takes longer than most of the programs that the docs show. Nothing of piecegraph and of its tests is imported
beforehand, so a program pays for, and sees, all that piecegraph does when it is imported and run; what it leaves behind
ends with its process. One server is enough for all workers of pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
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
        sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))  # as Python does when it starts
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

    def __init__(self, told: TextIO, out: Path, err: Path) -> None:
        self.pid = int(told.readline())
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
            with self._told:
                self._code = int(self._told.readline())
        return self._code


class ForkServer:
    """Has programs forked, one after the other."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self._folder = folder

    def start(self, *words: str, cwd: Path, seconds: int = 300, environment: dict[str, str] | None = None) -> Running:
        """As ``subprocess.Popen`` of Python with these words. It must have ended before the next is started."""
        out, err = self._folder / "out", self._folder / "err"
        for path in (out, err):
            path.write_text("")
        program = Program(words, environment or dict(os.environ), str(cwd), seconds, str(out), str(err))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._address)
            connection.sendall(json.dumps(asdict(program)).encode() + b"\n")
            return Running(connection.makefile(), out, err)

    def run(
        self, *words: str, cwd: Path, seconds: int = 300, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run`` of Python with these words."""
        program = self.start(*words, cwd=cwd, seconds=seconds, environment=environment)
        return subprocess.CompletedProcess(words, program.wait(), program.out, program.err)


@contextlib.contextmanager
def fork_server() -> Iterator[str]:
    """Start one; it ends when its input does. Gives the address that it listens at, once everything is imported."""
    pipe = subprocess.PIPE
    with TemporaryDirectory() as folder:
        address = str(Path(folder) / "socket")
        command = [sys.executable, __file__, address]
        # A thread for each program, as for each worker. Torch reads it when it is imported.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield address
            server.stdin.close()


def _serve(address: str) -> None:
    """Fork for each program that is asked for. Returns in the forked processes."""
    gc.disable()  # what is imported stays
    own = set(sys.modules)
    atexit.register(lambda: _spare(set(imported)))  # first in, last out: what programs register has run by then
    for name in _IMPORTED:
        importlib.import_module(name)
    _know_compilers()
    imported = {name: module for name, module in sys.modules.items() if name not in own}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(imported))
    gc.enable()
    gc.freeze()  # a collection would write to, and so copy, the pages of everything that was imported
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if not os.fork():
                break
            connection.close()
            _forget_ended()
        else:
            return
    _run_for(connection)


def _spare(names: set[str]) -> None:
    """Python takes each module apart that it finds here when it ends: to do so to all that was imported takes most of a
    second, and copies the pages it lies in. Modules of the program's own are taken apart as ever.
    """
    for name in names:
        sys.modules.pop(name, None)


def _forget_ended() -> None:
    """Those who waited for a program have told its end themselves."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _run_for(connection: socket.socket) -> None:
    """Fork once more, wait for the program and tell how it ended. Returns in its process."""
    with connection, connection.makefile("rw") as told:
        program = Program(**json.loads(told.readline()))
        child = os.fork()
        if child:
            print(child, file=told, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=told, flush=True)
            os._exit(0)  # nothing of what was imported need be taken apart
    program.become()


def _know_compilers() -> None:
    """Inductor reads all of its own files, and Triton's, before it first compiles, and remembers what they hash to; and
    it starts up to four processes to see which vector units of the CPU its code may use.
    """
    from torch._inductor import codecache
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.runtime import triton_compat

    pick_vec_isa()
    codecache.torch_key()
    if triton_compat.HAS_TRITON:
        triton_compat.triton_key()


if __name__ == "__main__":
    _serve(sys.argv[1])
