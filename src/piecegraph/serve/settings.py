"""What whoever starts a server may choose, validated."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from piecegraph.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How models are served."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""
    api_keys: tuple[str, ...] = ()
    """One of them must come with every request; none for no check."""
    admin_keys: tuple[str, ...] = ()
    """One of them must come with calls that load and unload models; without any, there are no such calls."""
    max_queue: int = 1024
    """Requests that wait for a model at most; further ones are told to come back."""
    max_body_bytes: int = 16 * 2**20
    timeout_s: float | None = None
    """Of a request, from its arrival to its last token."""
    api_processes: int = 0
    """Processes that speak HTTP for the one that runs the models; 0: it does so itself. See Note [API processes]."""
    drain_s: float | None = None
    """How long requests may take to end once the server was asked to; None for as long as they take."""

    def __post_init__(self) -> None:
        if any(not key.strip() for key in (*self.api_keys, *self.admin_keys)):
            raise ConfigError("PG101", "an API key is empty", hint="leave --api-key out to ask for none")
        if self.max_body_bytes < 1:
            raise ConfigError("PG101", f"max_body_bytes is {self.max_body_bytes}", why="it must be a positive integer")

    @property
    def is_open_to_others(self) -> bool:
        """Whether other machines can reach it, and nothing is asked of them."""
        return not self.api_keys and not is_loopback(self.host)

    @property
    def is_for_this_machine(self) -> bool:
        """Whether whoever reaches it is trusted because they are on this machine."""
        return not self.api_keys and is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether an address, or a name, is this machine's own and nobody else's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
