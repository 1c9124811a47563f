"""Sockets that clients connect to."""

from __future__ import annotations

import contextlib
import socket

from piecegraph.errors import CommandError

BACKLOG = 2048


def listen(host: str, port: int, *, shares: bool = False) -> socket.socket:
    """A socket that clients can connect to already.

    Args:
        host: an address of this machine, or a name of one.
        port: 0 for any that is free.
        shares: whether other sockets of ours have the same address; the system shares out connections among them.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            found.bind(address)
            found.listen(BACKLOG)
            stack.pop_all()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise CommandError(
            "PG614", f"{host}:{port} cannot be listened at", why=why, hint="choose another --port"
        ) from error
    return found


def listen_all(host: str, port: int, count: int) -> list[socket.socket]:
    """So many sockets of one address. Another server that shares its own in this way would go unnoticed, so it is
    first tried without.
    """
    first = listen(host, port)
    if count == 1:
        return [first]
    with first:
        port = first.getsockname()[1]
    return [listen(host, port, shares=True) for _ in range(count)]


def address_of(listening: socket.socket) -> str:
    """Where clients find it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
