"""What goes wrong with a request, as a status and a body in the shape of the API that was called."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from piecegraph.errors import ConfigError, ModelError, PiecegraphError, RequestError, describe
from piecegraph.llm.run.sampling_params import SamplingParams

_OF_CODES: Mapping[str, tuple[int, str]] = {
    "PG106": (503, "shutting_down"),
    "PG650": (500, "engine_error"),
    "PG652": (400, "context_length_exceeded"),
    "PG655": (500, "engine_error"),
    "PG657": (503, "engine_busy"),
    "PG658": (429, "queue_full"),
    "PG659": (504, "timeout"),
}
_RETRY_AFTER_S = 1

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SETTINGS = frozenset(field.name for field in fields(SamplingParams))
_ABOUT = {
    "PG651": "prompt",
    "PG652": "prompt",
    "PG653": "prompt",
    "PG654": "max_new_tokens",
    "PG660": "structured_outputs",
    "PG666": "prompt",
    "PG667": "prompt",
}
"""What an error is about if it begins with the name of no setting."""
_TAGS = ("text", "tool_use", "tool_result", "thinking")
"""Kinds of blocks, which pydantic has in a place behind the number of a block."""


class ApiError(Exception):
    """A request ends with this.

    Args:
        status: of HTTP.
        message: what the client is told.
        code: the same in a word.
        param: which field of the body it is about.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        self.status, self.message, self.code, self.param = status, message, code, param
        super().__init__(message)

    @property
    def headers(self) -> dict[str, str]:
        """Whoever comes too early, or is one too many, is told when to come back."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(_RETRY_AFTER_S)} if self.status in (429, 503) else {}

    def body(self, path: str) -> dict[str, Any]:
        """As the API at this path has it."""
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            is_named = self.param is None or self.param in self.message  # there is no other place to name it at
            message = self.message if is_named else f"{self.param}: {self.message}"
            return {"type": "error", "error": {"type": kind, "message": message}}
        kind = _OPENAI_TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unsupported(name: str, why: str) -> ApiError:
    """What the API has and this server has not."""
    return ApiError(400, f"{name} is not supported: {why}", code="unsupported_parameter", param=name)


def of_piecegraph(error: PiecegraphError, names: Mapping[str, str]) -> ApiError:
    """The status of one of our own errors. What is not the request's fault is the server's.

    Args:
        error: which.
        names: what the request calls what errors are about: see :attr:`piecegraph.serve.record.Record.names`.
    """
    status, code = _OF_CODES.get(error.code, (0, error.code))
    if not status:
        is_of_request = isinstance(error, (RequestError, ConfigError)) or error.code in ("PG666", "PG667")
        status = 400 if is_of_request and isinstance(error, (RequestError, ConfigError, ModelError)) else 500
    subject = _subject(error)
    first, _, rest = error.what.partition(" ")
    what = f"{names.get(first, first)} {rest}" if first in _SETTINGS else error.what
    where, why, hint = names.get(error.where, error.where), _renamed(error.why, names), _renamed(error.hint, names)
    message = describe(error.code, what, where, why, hint)
    param = None if subject is None or status != 400 else names.get(subject, subject)
    return ApiError(status, message, code=code, param=param)


def _subject(error: PiecegraphError) -> str | None:
    """The setting that an error is about, or the prompt, or the place in it."""
    if error.code == "PG667" and error.where:
        return error.where
    words = (error.what.partition(" ")[0], error.why.partition(" ")[0])
    return next((word for word in words if word in _SETTINGS), _ABOUT.get(error.code))


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """With the request's names of settings; those that are plain words may be meant as such."""
    return _NAME.sub(lambda found: names.get(found[0], found[0]) if found[0] in _SETTINGS else found[0], text)


_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic found wrong with a body, by name. Where several forms were tried, the deepest place tells most."""
    first = max(errors, key=lambda each: len(each["loc"]))
    name = _place(first["loc"]) or "body"
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not supported by this server", code="unsupported_parameter", param=name)
    message = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return ApiError(400, message, code="invalid_value" if first["type"] != "missing" else "missing", param=name)


def _place(loc: Sequence[str | int]) -> str:
    """Where in a body something is, as a client would write it.

    >>> _place(("body", "messages", 1, "content", "list[tagged-union[TextBlock,ToolUseBlock]]", 0, "text", "text"))
    'messages[1].content[0].text'
    """
    parts = [part for part in loc[1:] if not _is_type(part)]
    found = ""
    for number, part in enumerate(parts):
        is_last, before = number == len(parts) - 1, parts[number - 1] if number else None
        if part in _TAGS and isinstance(before, int) and not is_last:
            continue
        found += f"[{part}]" if isinstance(part, int) else f".{part}" if found else part
    return found


def _is_type(part: Any) -> bool:
    """Whether a part of a place is the type that pydantic tried, and no field: ``list[str]``, ``TextPart``."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "float", "bool") or part[:1].isupper())
