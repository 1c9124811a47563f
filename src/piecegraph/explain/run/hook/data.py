"""What a recorder writes down, as plain data: exceptions with their frames, times, and JSON of them."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False  # as type checkers know it, without importing typing
if TYPE_CHECKING:
    from typing import Any

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

MAX_FRAMES, MAX_MESSAGE, MAX_CHAIN = 120, 20_000, 20

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))


def quiet(function: Any) -> Any:
    """A function that never raises: the program must not notice that it is being recorded."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception:  # noqa: BLE001 - a full disk, a name gone at exit, an exception that lies about itself
            return None

    return call


def is_own(file: str) -> bool:
    """Whether a file is one of the recorder."""
    return os.path.dirname(file) == _OWN_FOLDER


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
        if not is_own(code.co_filename):
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


def now() -> dict[str, int]:
    """Wall time for people, monotonic time for the order of processes of one machine."""
    return {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}
