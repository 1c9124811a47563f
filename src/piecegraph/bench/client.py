"""A server that speaks OpenAI's API: its address, its model, and a request as it is sent; by the standard library."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from dataclasses import dataclass
from typing import Any

from piecegraph.errors import CommandError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to connect to."""

    addresses: tuple[str, ...]
    """Of the same host: the first that can be reached is meant."""
    port: int
    tls_name: str | None
    """Whom the server has to be by its certificate; None: it is not asked for one."""
    timeout_s: float
    """Of a request that nothing comes from."""


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
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._is_tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {
            "Host": parts.netloc.rpartition("@")[2],
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def model_name(self) -> str:
        """What the server calls its first model.

        Raises:
            CommandError: it does not answer, or not as OpenAI's API does.
        """
        connect = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=self._timeout_s)
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
            raise self._silent(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise CommandError("PG616", f"{self.url} does not tell its models", why="no such answer") from error
        finally:
            connection.close()

    def target(self) -> Target:
        """Where it is; names are looked up once, for all requests.

        Raises:
            CommandError: its name is not known.
        """
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise self._silent(error) from error
        return Target(
            addresses=tuple(dict.fromkeys(str(address[0]) for *_, address in found)),
            port=self._port,
            tls_name=self._host if self._is_tls else None,
            timeout_s=self._timeout_s,
        )

    def request_for(self, body: dict[str, Any]) -> bytes:
        """All that is sent to ask for a completion in parts."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(asked, separators=(",", ":")).encode()
        headers = {**self._headers, "Content-Length": str(len(data))}
        lines = [f"POST {self._base}/completions HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + data

    def _silent(self, error: Exception) -> CommandError:
        why = str(error) or type(error).__name__
        return CommandError("PG616", f"{self.url} does not answer", why=why, hint="start it first")
