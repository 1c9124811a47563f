"""Records of JSON, one a line, as the lines that a program printed before a logger or a collector wrapped them.

In comes a line of a log, out comes the same line, or the text of the record: its time and level as Python's logging
would have printed them, the message, and the traceback that stands in a field of its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MESSAGES = ("log", "message", "msg", "event", "textPayload")
_TRACEBACKS = ("exc_info", "exc_text", "exception", "traceback", "stack_trace", "stack", "stacktrace")
_NESTED = ("jsonPayload", "record", "error", "exc_info", "exception")
"""Records in a record: a cloud's, loguru's, those of ECS."""
_LEVELS = ("level", "levelname", "severity", "log.level", "level_name")
_TIMES = ("time", "timestamp", "@timestamp", "asctime", "ts")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?")
_KNOWN_LEVELS = {"WARN": "WARNING", "NOTICE": "INFO"} | {
    level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "FATAL")
}
_BEFORE = re.compile(
    r"(?:\[[^\]{}]{1,80}\]:?|\([^(){}]{1,80}\)|[\w.-]{1,60} +\||\d{4}-\S{10,30}(?: std\w+ [FP])?)? ?(?=\{\")"
)
"""What a launcher or a collector puts in front of a record."""
_MAX_DEPTH = 3


def unwrapped(raw: str) -> str:
    """The text of a record of JSON, which may be several lines; any other line as it is.

    >>> unwrapped('{"log": "ValueError: no\\\\n", "stream": "stderr"}'), unwrapped('{"rank": 3, "msg": "ready"}')
    ('ValueError: no', '[rank3]: ready')
    >>> unwrapped('{"level": "error", "message": "failed", "exc_info": "ValueError: no"}')
    'ERROR:json:failed\\nERROR:json:ValueError: no'
    """
    before = _BEFORE.match(raw) if raw.rstrip().endswith("}") else None
    if before is None:
        return raw
    try:
        record = json.loads(raw[before.end() :])
    except (ValueError, RecursionError):
        return raw
    whole = record.get("text") if isinstance(record.get("record"), dict) else None  # loguru's
    message = whole if isinstance(whole, str) else _first(record, _MESSAGES)
    traceback = _traceback(record)
    if message is None and traceback is None:
        return raw
    if message is not None and traceback is not None and traceback.strip() in message:
        traceback = None
    rank = record.get("rank")
    head = (f"[rank{rank}]: " if type(rank) is int else "") + _head(record)
    return before[0] + "\n".join(head + part.rstrip("\n") for part in (message, traceback) if part is not None)


def _first(record: dict[str, Any], keys: tuple[str, ...], depth: int = 0) -> str | None:
    """The text under the first of the keys that has one, in the record or in one inside it."""
    found = next((record[key] for key in keys if isinstance(record.get(key), str)), None)
    if found is not None or depth == _MAX_DEPTH:
        return found
    inside = (record[key] for key in _NESTED if isinstance(record.get(key), dict))
    return next(filter(None, (_first(one, keys, depth + 1) for one in inside)), None)


def _traceback(record: dict[str, Any]) -> str | None:
    dotted = {key.rpartition(".")[2]: value for key, value in record.items() if "." in key}
    found = _first({**dotted, **record}, _TRACEBACKS)
    return found if found is not None and ("\n" in found or ": " in found) else None  # a flag or a name is none


def _head(record: dict[str, Any]) -> str:
    """Time and level in the form of Python's logging."""
    level = _KNOWN_LEVELS.get((_first(record, _LEVELS) or "").upper())
    if level is None:
        return ""
    time = _TIME.match(_first(record, _TIMES) or "")
    return f"{time[0]} {level}: " if time is not None else f"{level}:json:"
