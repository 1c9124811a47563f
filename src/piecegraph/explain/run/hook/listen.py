"""Where a recorder listens: the ways in which a process ends or fails, and what its parents see of that."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys

from .data import frames_of, is_own, quiet, text_of
from .recorder import FOLDER_VARIABLE, PRINTED, ProcessRecorder

TYPE_CHECKING = False  # as type checkers know it, without importing typing
if TYPE_CHECKING:
    from typing import Any


def hide(tb: Any) -> None:
    """Take our own frames out of a traceback that is about to be printed."""
    while tb is not None:
        while tb.tb_next is not None and is_own(tb.tb_next.tb_frame.f_code.co_filename):
            tb.tb_next = tb.tb_next.tb_next
        tb = tb.tb_next


def watch_main(recorder: ProcessRecorder) -> None:
    """Uncaught exceptions of the main thread, and the end of the interpreter."""
    previous = sys.excepthook

    def excepthook(kind: Any, error: Any, tb: Any) -> None:
        recorder.note_exception("interrupted" if isinstance(error, KeyboardInterrupt) else "exception", error)
        hide(tb)
        previous(kind, error, tb)

    sys.excepthook = excepthook
    atexit.register(recorder.end)
    os.register_at_fork(after_in_child=quiet(recorder.begin))


def watch_exits(recorder: ProcessRecorder) -> None:
    """Ways out that pass by no exception hook."""
    leave, immediately, enable = sys.exit, os._exit, faulthandler.enable

    @quiet
    def remember(status: Any) -> None:
        if status is not None and status != 0:
            caller = sys._getframe(3)
            found = [(caller.f_code.co_filename, caller.f_lineno, caller.f_code.co_name, caller.f_globals)]
            code = status & 0xFF if isinstance(status, int) else 1
            recorder.exit_call = {"code": code, "said": text_of(status), "frame": frames_of(found)[0][0]}

    def exit(status: Any = None, /) -> None:
        remember(status)
        leave(status)

    def _exit(status: int) -> None:
        recorder.end(status)
        immediately(status)

    def own_enable(*args: Any, **kwargs: Any) -> None:
        recorder.owns_faulthandler = False  # the program wants its fatal stacks elsewhere, in its children too
        enable(*args, **kwargs)

    sys.exit, os._exit, faulthandler.enable = exit, _exit, own_enable  # type: ignore[assignment]
    for name in ("execv", "execve"):
        setattr(os, name, around_exec(recorder, getattr(os, name)))


def around_exec(recorder: ProcessRecorder, function: Any) -> Any:
    """An exec that says beforehand that this program ends here."""

    def call(*args: Any) -> Any:
        recorder.set_state("replaced")
        try:
            return function(*args)
        finally:
            recorder.set_state("started")

    return call


def watch_children(recorder: ProcessRecorder) -> None:
    """How children died, as their parents see it, and who sent which signal."""
    waitpid, kill, killpg = os.waitpid, os.kill, os.killpg

    def watched_waitpid(pid: int, options: int, /) -> tuple[int, int]:
        found, status = waitpid(pid, options)
        if found and status:
            recorder.note("children", {"pid": found, "status": status})
        return found, status

    def watched_kill(pid: int, number: int, /) -> None:
        if number:
            recorder.note("sent", {"pid": pid, "signal": number})  # before: it may be the last thing this process does
        kill(pid, number)

    def watched_killpg(group: int, number: int, /) -> None:
        if number:
            recorder.note("sent", {"group": group, "signal": number})
        killpg(group, number)

    os.waitpid, os.kill, os.killpg = watched_waitpid, watched_kill, watched_killpg  # type: ignore[assignment]


def watch_output(recorder: ProcessRecorder) -> None:
    """What is printed through Python: on the streams themselves, so that nobody gets another object than before."""

    def noting(real_write: Any) -> Any:
        def write(text: str, /) -> int:
            num_written: int = real_write(text)
            recorder.note_output(text)
            return num_written

        return write

    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.write = noting(stream.write)  # type: ignore[method-assign]


def watch_threads(recorder: ProcessRecorder, threading: Any) -> None:
    """Uncaught exceptions of threads."""
    previous = threading.excepthook

    def excepthook(args: Any) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            recorder.note_exception("thread", args.exc_value, getattr(args.thread, "name", "") or "unnamed")
            hide(args.exc_traceback)
        previous(args)

    threading.excepthook = excepthook


def watch_printing(recorder: ProcessRecorder, traceback: Any) -> None:
    """Exceptions that are handled and printed: engines log the cause of their death and then exit by other means."""

    @quiet
    def look(args: Any, kwargs: Any) -> None:
        error = next((part for part in (*args[:2], kwargs.get("value")) if isinstance(part, BaseException)), None)
        if error is None or isinstance(error, SystemExit):
            return
        hide(error.__traceback__)
        printer = sys._getframe(3).f_back  # print_exc was called here
        died = (
            printer is not None and printer.f_code.co_name == "_bootstrap"
        )  # of multiprocessing: it prints, then exits
        interrupted = isinstance(error, KeyboardInterrupt)
        recorder.note_exception(("interrupted" if interrupted else "exception") if died else PRINTED, error)

    def watched(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            look(args, kwargs)
            return function(*args, **kwargs)

        call.__name__, call.__doc__ = function.__name__, function.__doc__
        return call

    for name in ("print_exception", "format_exception"):
        setattr(traceback, name, watched(getattr(traceback, name)))


def watch_names(recorder: ProcessRecorder, process: Any) -> None:
    """The names that multiprocessing gives to processes."""
    real_bootstrap = process.BaseProcess._bootstrap

    def _bootstrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.note_name(self.name)
        return real_bootstrap(self, *args, **kwargs)

    process.BaseProcess._bootstrap = _bootstrap


class Watcher:
    """Calls back when a module has been imported, so that nothing is imported for our sake."""

    def __init__(self, callbacks: Any) -> None:
        self.callbacks: Any = {}
        for name, callback in callbacks.items():
            if name in sys.modules:
                callback(sys.modules[name])
            else:
                self.callbacks[name] = callback
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the module as if we were not there, and watch it being executed."""
        callback = self.callbacks.pop(name, None)
        if callback is None:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for finder in finders if (found := finder.find_spec(name, path, target))), None)
        loader = getattr(spec, "loader", None)
        if loader is not None and not isinstance(loader, type):
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                del loader.exec_module
                execute(module)
                quiet(callback)(module)

            loader.exec_module = exec_module
        return spec


def install(environment: Any) -> None:
    """Start recording this process, where the environment says so."""
    if FOLDER_VARIABLE not in environment:
        return
    recorder = ProcessRecorder(environment[FOLDER_VARIABLE])
    watch_main(recorder)
    watch_exits(recorder)
    watch_children(recorder)
    quiet(watch_output)(recorder)
    Watcher(
        {
            "threading": lambda module: watch_threads(recorder, module),
            "traceback": lambda module: watch_printing(recorder, module),
            "multiprocessing.process": lambda module: watch_names(recorder, module),
        }
    )
