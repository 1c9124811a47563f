"""What goes wrong with a request, as a status and a body in the shape of the API that was called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from piecegraph.errors import ConfigError, ModelError, PiecegraphError, RequestError

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
_OUR_NAMES = {"max_new_tokens": "max_tokens"}
"""Of settings that an API calls otherwise."""


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
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _OPENAI_TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unsupported(name: str, why: str) -> ApiError:
    """What the API has and this server has not."""
    return ApiError(400, f"{name} is not supported: {why}", code="unsupported_parameter", param=name)


def of_piecegraph(error: PiecegraphError) -> ApiError:
    """The status of one of our own errors. What is not the request's fault is the server's."""
    status, code = _OF_CODES.get(error.code, (0, error.code))
    if not status:
        is_of_request = isinstance(error, (RequestError, ConfigError)) or error.code in ("PG666", "PG667")
        status = 400 if is_of_request and isinstance(error, (RequestError, ConfigError, ModelError)) else 500
    name = error.what.split(" ", 1)[0] if error.code == "PG108" else None
    return ApiError(status, str(error), code=code, param=_OUR_NAMES.get(name, name) if name else None)


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic found wrong with a body, by name. Where several forms were tried, the deepest place tells most."""
    first = max(errors, key=lambda each: len(each["loc"]))
    place = [str(part) for part in first["loc"] if part not in ("body",) and not _is_type(part)]
    name = ".".join(place) or "body"
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{name} is not supported by this server", code="unsupported_parameter", param=name)
    message = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return ApiError(400, message, code="invalid_value" if first["type"] != "missing" else "missing", param=name)


def _is_type(part: Any) -> bool:
    """Whether a part of a place is the type that pydantic tried, and no field: ``list[str]``, ``TextPart``."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "float", "bool") or part[:1].isupper())
