"""What a single line of a traceback looks like: its head, a frame, the first line of an exception's text, a link.

Everything here takes the text of one line, without its prefixes, and knows nothing of the lines around it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

PartKind = Literal["header", "frame", "text", "link"]

HEADER_TEXT = "Traceback (most recent call last):"
LINK_TEXTS = {
    "During handling of the above exception, another exception occurred:": "context",
    "The above exception was the direct cause of the following exception:": "cause",
}
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:,? in (?P<function>.+?))?\s*$')
_HEADER = re.compile(r"^(?P<lead>.*?)(?:Exception Group )?Traceback \(most recent call last\):\s*$")
_STACK_HEADER = re.compile(r"^\s*(?:Stack|Call stack|Stack trace)(?: \(most recent call last\))?:\s*$", re.IGNORECASE)
NAMED = re.compile(r"^Process (?P<name>\S+):\s*$")
_EXCEPTION = re.compile(
    r"^(?P<type>[A-Za-z_]\w*(?:\.(?:[A-Za-z_]\w*|<locals>))*(?:\([A-Za-z_][\w.]*\))?)(?::(?:\s(?P<message>.*))?)?$"
)
EXCEPTION_NAME = re.compile(
    r"(?:Error|Exception|Failed|Failure|Interrupt|Exit|Warning|Timeout|TimedOut|Unsupported|Abort\w*|Fault|StopIteration"
    r"|StopAsyncIteration|Empty|Full|Died|Group|Dead|Refused)$"
)
COMMAND_END = re.compile(
    r"'? (?:returned non-zero exit status -?\d+|died with (?:<Signals\.\w+: \d+>|unknown signal \d+))\.?$"
)
"""How the message about a command ends, which may be many lines long."""
_CLASS_IN_MODULE = re.compile(r"\._?[A-Z]\w*$")
_NUMBER = re.compile(r"0x[0-9a-fA-F]{4,}|\d+(?:\.\d+)?")


@lru_cache(maxsize=1 << 15)
def kind_of(text: str) -> PartKind | Literal["stack", "named", ""]:
    """What a line is by itself; an exception's text can only be told from its place."""
    if 'File "' in text and FRAME.match(text):
        return "frame"
    if "most recent call last" in text and _HEADER.match(text):
        return "header"
    if text.strip() in LINK_TEXTS:
        return "link"
    if text.startswith("Process ") and NAMED.match(text):
        return "named"
    return "stack" if "tack" in text and _STACK_HEADER.match(text) else ""


@lru_cache(maxsize=1 << 14)
def frame_of(text: str) -> tuple[str, int, str] | None:
    """File, line and function, if a line names a frame.

    >>> frame_of('  File "/srv/train.py", line 12, in main')
    ('/srv/train.py', 12, 'main')
    """
    found = FRAME.match(text)
    return (found["file"], int(found["line"]), found["function"] or "") if found is not None else None


@lru_cache(maxsize=1 << 14)
def exception_of(text: str) -> tuple[str, str] | None:
    """Type and message, if a line reads like the first line of an exception's text.

    >>> exception_of("torch.OutOfMemoryError: CUDA out of memory.")
    ('torch.OutOfMemoryError', 'CUDA out of memory.')
    """
    found = _EXCEPTION.match(text)
    if found is None:
        return None
    name = found["type"]
    if found["message"] is None and not EXCEPTION_NAME.search(name) and not _CLASS_IN_MODULE.search(name):
        return None
    return name, (found["message"] or "")


@lru_cache(maxsize=1 << 14)
def mask(text: str) -> str:
    """Without what differs between processes that fail alike.

    >>> mask("CUDA error on device 3: <Stream at 0x7f132db09880>, 1.5 GiB")
    'CUDA error on device #: <Stream at #>, # GiB'
    """
    return _NUMBER.sub("#", text)


def unmasked(masked: str) -> str:
    """A pattern of the texts that :func:`mask` makes this text of."""
    return re.escape(masked).replace(r"\#", f"(?:{_NUMBER.pattern})")
