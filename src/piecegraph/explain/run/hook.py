"""The recorder that ``piecegraph run`` puts into every Python process of a command.

``run`` copies this file as ``sitecustomize.py`` into a private folder that comes first on the command's
``PYTHONPATH``. In goes whatever ends the process or is printed by it; out comes one JSON file for the process, replaced
as a whole whenever there is more to say, and one file of raw stacks that ``faulthandler`` writes to.

It runs inside programs that know nothing of it, so: one file (which is why it is long), only the standard library, any
Python from 3.9 on, nothing heavy imported before a failure, no reference kept to an exception (its frames may hold
gigabytes), and an error in here is swallowed. The one invariant: what the program prints and how it ends are what they
would be without it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import atexit
import faulthandler
import os
import sys
import time

TYPE_CHECKING = False  # as type checkers know it, without importing typing
if TYPE_CHECKING:
    from typing import Any

FOLDER_VARIABLE = "PIECEGRAPH_RECORDS"
SCHEMA = 1
STACK_SIGNAL = _signal.SIGRTMAX - 5
"""Asks for the stacks of all threads. A real-time signal that nothing is known to use: SIGUSR1 stays the program's."""

PRINTED = "told"
"""The kind of an exception that was handled and printed, in the word that records of this schema have for it."""

RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "TP_RANK", "PP_RANK", "DP_RANK", "VLLM_DP_RANK"),
)
PHASE_MARKERS = (
    # (phase, part of the file's path, part of the function's name)
    ("capture", "cuda_graph", "capture"),
    ("capture", "cudagraph", "capture"),
    ("capture", "torch/cuda/graphs.py", ""),
    ("capture", "", "capture_model"),
    ("compile", "torch/_dynamo/convert_frame.py", ""),
    ("compile", "torch/_inductor/compile_fx.py", ""),
    ("compile", "triton/compiler/compiler.py", ""),
    ("kv cache", "", "init_memory_pool"),
    ("kv cache", "", "initialize_kv_cache"),
    ("load", "", "load_model"),
    ("load", "", "load_weights"),
    ("load", "", "load_state_dict"),
    ("load", "", "from_pretrained"),
    ("init", "", "init_process_group"),
    ("init", "", "init_distributed_environment"),
    ("init", "", "init_torch_distributed"),
)
ERROR_FIELDS = ("code", "phase", "piece", "size", "op", "line")
"""What piecegraph's own errors know of where they happened."""

MAX_FRAMES, MAX_MESSAGE, MAX_CHAIN, MAX_PRINTED, MAX_NOTED, MAX_WRITES = 120, 20_000, 20, 8, 200, 100


def quiet(function: Any) -> Any:
    """A function that never raises: the program must not notice that it is being recorded."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception:  # noqa: BLE001 - a full disk, a name gone at exit, an exception that lies about itself
            return None

    return call


# -- exceptions as data


def text_of(value: object) -> str:
    """What an exception says, even if it fails to."""
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001 - user code
        return f"<str() raised {type(error).__name__}>"
    cut = len(text) - MAX_MESSAGE
    return text if cut <= 0 else f"{text[:MAX_MESSAGE]}... <{cut} more characters>"


def type_name(error: BaseException) -> str:
    """The type as a traceback prints it."""
    kind = type(error)
    home = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return home + kind.__qualname__


def positions(tb: Any) -> list[Any]:
    """(file, line, function, globals) of every frame, outermost first, without our own."""
    found = []
    while tb is not None:
        code = tb.tb_frame.f_code
        if code.co_filename != __file__:
            found.append((code.co_filename, tb.tb_lineno or 0, code.co_name, tb.tb_frame.f_globals))
        tb = tb.tb_next
    return found


def frames_of(found: list[Any]) -> tuple[list[Any], int]:
    """Frames with their source text; the middle of a deep recursion is left out. Also how many were."""
    import linecache

    half = MAX_FRAMES // 2
    kept = found if len(found) <= MAX_FRAMES else found[:half] + found[-half:]
    frames = [[file, line, name, linecache.getline(file, line, names).strip()] for file, line, name, names in kept]
    return frames, len(found) - len(kept)


def as_data(error: BaseException, link: str) -> dict[str, Any]:
    """One exception without those that led to it."""
    frames, num_left_out = frames_of(positions(error.__traceback__))
    notes = [text_of(note) for note in tuple(getattr(error, "__notes__", None) or ())[:20]]
    fields = {name: getattr(error, name, None) for name in ERROR_FIELDS} if hasattr(error, "hint") else {}
    return {
        "type": type_name(error),
        "message": text_of(error),
        "frames": frames,
        "frames_left_out": num_left_out,
        "link": link,
        "notes": notes,
        "fields": {name: value for name, value in fields.items() if isinstance(value, (str, int)) and value != ""},
    }


def chain_of(error: BaseException, seen: set[int] | None = None, link: str = "") -> list[Any]:
    """An exception and what led to it, in the order in which they were raised. Members of a group come before it."""
    seen = set() if seen is None else seen
    seen.add(id(error))
    earlier = []
    how, before = ("cause", error.__cause__) if error.__cause__ is not None else ("context", error.__context__)
    hidden = how == "context" and error.__suppress_context__
    if before is not None and not hidden and id(before) not in seen and len(seen) < MAX_CHAIN:
        earlier = chain_of(before, seen, "")
    else:
        how = ""
    members = getattr(error, "exceptions", None)
    for member in members if isinstance(members, tuple) else ():
        if isinstance(member, BaseException) and id(member) not in seen and len(seen) < MAX_CHAIN:
            earlier += chain_of(member, seen, "context" if earlier else "")
            how = how or "cause"
    return [*earlier, as_data(error, how or link)]


def phases_in(chain: list[Any]) -> list[str]:
    """The phases a failure happened in, outermost first: what piecegraph's errors say, then what the frames show."""
    found = [data["fields"]["phase"] for data in chain if "phase" in data["fields"]]
    for data in chain:
        for file, _, function, _ in data["frames"]:
            found += [phase for phase, path, name in PHASE_MARKERS if path in file and name in function]
    return list(dict.fromkeys(found))


# -- JSON without the json module, which costs more to import than all of this


def to_json(value: object) -> str:
    """A JSON document in ASCII: lone surrogates survive as escapes."""
    if isinstance(value, str):
        return quote(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quote(str(key))}: {to_json(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_json, value)) + "]"
    return str(int(value))  # type: ignore[call-overload]


try:
    from _json import encode_basestring_ascii as quote
except ImportError:
    from json.encoder import encode_basestring_ascii as quote  # type: ignore[assignment]


# -- the record


def now() -> dict[str, int]:
    """Wall time for people, monotonic time for the order of processes of one machine."""
    return {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}


class ProcessRecorder:
    """The record of this process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.owns_faulthandler = not faulthandler.is_enabled()
        self.begin()

    def begin(self) -> None:
        """Start the record: when the interpreter starts, and again in a forked child."""
        self.lock = _thread.RLock()
        self.num_writes = 0
        self.exit_call: Any = None
        self.path = os.path.join(self.folder, f"{os.getpid()}-{time.monotonic_ns()}")
        self.record: Any = {
            "schema": SCHEMA,
            "state": "started",
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "group": os.getpgrp(),
            "start_ticks": start_ticks(),
            "host": os.uname().nodename,
            "python": sys.version.split()[0],
            "argv": arguments(),
            "started": now(),
            "ended": None,
            "code": None,
            "failures": [],
            "children": [],
            "sent": [],
        }
        self.save()
        self.arm()

    def arm(self) -> None:
        """Let fatal signals, and :data:`STACK_SIGNAL`, write stacks to this process's own file."""
        import fcntl

        low = os.open(self.path + ".stack", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:  # out of the way of programs that count on the number of the next file
            descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 500)
        except (OSError, ValueError):
            descriptor = low
        else:
            os.close(low)
        if self.owns_faulthandler:
            real["faulthandler.enable"](file=descriptor)
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)

    def save(self) -> None:
        """Replace the file as a whole: a reader never sees half a record."""
        self.num_writes += 1
        if self.num_writes > MAX_WRITES:
            return
        self.record["ranks"] = {name: os.environ[name] for name in RANK_VARIABLES if name in os.environ}
        self.record["rank"] = distributed_rank()
        self.record["name"] = process_name()
        if not self.lock.acquire(True, 1):
            return
        try:
            descriptor = os.open(self.path + ".tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                data = to_json(self.record).encode("ascii")
                while data:
                    data = data[os.write(descriptor, data) :]
            finally:
                os.close(descriptor)
            os.replace(self.path + ".tmp", self.path + ".json")
        finally:
            self.lock.release()

    @quiet
    def note_exception(self, kind: str, error: BaseException, thread: str = "") -> None:
        """Note an exception that ended the process or a thread, or (:data:`PRINTED`) was handled and printed."""
        innermost = (positions(error.__traceback__) or [("", 0, "", {})])[-1][:3]
        key = [type_name(error), *innermost, text_of(error)[:200]]
        failures = self.record["failures"]
        for failure in failures:
            if failure["key"] == key and failure["thread"] == thread:
                if failure["kind"] == PRINTED != kind:
                    failure["kind"] = kind
                    self.save()
                return
        chain = chain_of(error)
        entry = {"kind": kind, "thread": thread, "time": now(), "key": key, "phase": phases_in(chain), "chain": chain}
        printed = [failure for failure in failures if failure["kind"] == PRINTED]
        if len(printed) >= MAX_PRINTED:
            failures.remove(printed[0])
        failures.append(entry)
        if kind != PRINTED:
            self.num_writes = 0  # what ends a process is always written
        self.save()

    @quiet
    def note(self, what: str, entry: dict[str, object]) -> None:
        """Note a child's death or a signal that was sent."""
        if len(self.record[what]) < MAX_NOTED:
            self.record[what].append({**entry, "time": now()})
            self.save()

    @quiet
    def set_state(self, state: str) -> None:
        """Note that another program is about to take this process over, or that it failed to."""
        self.record["state"] = state
        self.save()

    @quiet
    def end(self, code: int | None = None) -> None:
        """Note how the process ends; the first word counts."""
        if self.record["state"] == "ended":
            return
        last = getattr(sys, "last_value", None)
        if code is None and last is not None:
            # Somebody else's excepthook did not pass the exception on.
            self.note_exception("interrupted" if isinstance(last, KeyboardInterrupt) else "exception", last)
            code = 1
        called = self.exit_call
        if called is not None and code in (None, called["code"]):
            code = called["code"]
            self.record["exit_call"] = called
        self.record.update(state="ended", code=code, ended=now())
        self.num_writes = 0  # the last word is always written
        self.save()


def start_ticks() -> int | None:
    """When the kernel started this process: with the pid, its identity."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def arguments() -> list[str]:
    """The command line of this process."""
    found: Any = getattr(sys, "orig_argv", None) or getattr(sys, "argv", None) or ()
    return [str(part)[:500] for part in found[:40]]


@quiet
def process_name() -> str:
    """What multiprocessing calls this process."""
    module = sys.modules.get("multiprocessing.process")
    name = module.current_process().name if module is not None else ""
    return "" if name == "MainProcess" else name


@quiet
def distributed_rank() -> int | None:
    """The rank torch.distributed gave this process."""
    module = sys.modules.get("torch.distributed")
    return module.get_rank() if module is not None and module.is_available() and module.is_initialized() else None


# -- where the recorder listens

real = {"faulthandler.enable": faulthandler.enable}
"""What was replaced, by name."""


def hide(tb: Any) -> None:
    """Take our own frames out of a traceback that is about to be printed."""
    while tb is not None:
        while tb.tb_next is not None and tb.tb_next.tb_frame.f_code.co_filename == __file__:
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


def run_users_own(own: Any) -> None:
    """Run the sitecustomize that Python would have found without ours, which is off the path by now."""
    del sys.modules["sitecustomize"]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


def install(folder: str) -> None:
    """Start recording this process."""
    recorder = ProcessRecorder(folder)
    watch_main(recorder)
    watch_exits(recorder)
    watch_children(recorder)
    Watcher({"threading": lambda m: watch_threads(recorder, m), "traceback": lambda m: watch_printing(recorder, m)})


if __name__ == "sitecustomize":
    own_folder = os.path.dirname(os.path.abspath(__file__))
    if FOLDER_VARIABLE in os.environ and not hasattr(sys, "_piecegraph_records"):  # a run inside a run: the inner one
        sys._piecegraph_records = True  # type: ignore[attr-defined]
        quiet(install)(os.environ[FOLDER_VARIABLE])
    sys.path[:] = [part for part in sys.path if os.path.abspath(part) != own_folder]
    run_users_own(sys.modules["sitecustomize"])
