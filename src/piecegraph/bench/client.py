"""A request to a server that speaks OpenAI's API: what it answered, and when. Nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from piecegraph.errors import CommandError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request."""

    status: str
    """``200``, another status of HTTP, or what broke the connection."""
    times_s: tuple[float, ...] = ()
    """When each part of the answer came, counted from when it was asked for."""
    num_prompt: int = 0
    num_new: int = 0

    @property
    def is_whole(self) -> bool:
        return self.status == "200"


class Client:
    """An address.

    Args:
        url: of the server, with or without ``/v1``.
        api_key: brought with every request, if there is one.
        timeout_s: of a request that nothing comes from.

    Raises:
        CommandError: it is no address.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandError("PG616", f"{url} is no address", hint="write http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def model_name(self) -> str:
        """What the server calls its first model.

        Raises:
            CommandError: it does not answer, or not as OpenAI's API does.
        """
        connection = self._connection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request("GET", f"{self._base}/models", headers=self._headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            if response.status != 200:
                raise CommandError(
                    "PG616", f"{self.url} does not tell its models", why=f"{response.status} {text:.200}"
                )
            return str(json.loads(text)["data"][0]["id"])
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise CommandError("PG616", f"{self.url} does not answer", why=why, hint="start it first") from error
        except (ValueError, LookupError, TypeError) as error:
            raise CommandError("PG616", f"{self.url} does not tell its models", why="no such answer") from error
        finally:
            connection.close()

    def complete(self, body: dict[str, Any]) -> Answer:
        """Send a request for a completion, and read the parts of its answer as they come."""
        connection = self._connection(self._host, self._port, timeout=self._timeout_s)
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        start = time.perf_counter()
        try:
            connection.request("POST", f"{self._base}/completions", json.dumps(asked), self._headers)
            response = connection.getresponse()
            if response.status != 200:
                return Answer(status=str(response.status))
            return _read(response, start)
        except (OSError, http.client.HTTPException) as error:
            return Answer(status=type(error).__name__)
        finally:
            connection.close()


def _read(response: http.client.HTTPResponse, start: float) -> Answer:
    times: list[float] = []
    usage: dict[str, Any] = {}
    for event in _events(response):
        if "error" in event:
            return Answer(status="error in the stream", times_s=tuple(times))
        choices = event.get("choices") or ()
        # The last part may hold nothing but why it ended; if it is the only one, no token before it had a text.
        if any(choice.get("text") for choice in choices) or (choices and not times):
            times.append(time.perf_counter() - start)
        usage = event.get("usage") or usage
    if not times:
        return Answer(status="no answer")
    num_new = int(usage.get("completion_tokens", len(times)))
    return Answer(status="200", times_s=tuple(times), num_prompt=int(usage.get("prompt_tokens", 0)), num_new=num_new)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The documents of a stream of events, up to the one that says that it is done.

    Raises:
        http.client.HTTPException: the stream is cut off, or holds something else.
    """
    for line in response:
        name, _, value = line.decode().partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            return
        try:
            yield json.loads(value)
        except ValueError as error:
            raise http.client.HTTPException("no JSON") from error
    raise http.client.IncompleteRead(b"")
