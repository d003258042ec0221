"""The socket where the workers meet: it listens at the address the workers were given, not on every network of the machine."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable

__all__ = ["is_loopback", "listening_socket"]


def listening_socket(address: str, port: int, *, one_machine: bool, say: Callable[[str], None]) -> socket.socket | None:
    """A socket bound to that address, or None where one must listen on every network; ``say`` is told so.

    Args:
        one_machine: all workers run on this machine, so a name may mean its loopback address.

    Raises:
        OSError: the port is in use, or the address does not resolve.
    """
    for family, kind, protocol, _, where in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        # Many machines resolve their own name to loopback, where no other machine would reach the store.
        if is_loopback(str(where[0])) and not (one_machine or is_loopback(address)):
            continue
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
        except OSError as error:
            bound.close()
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            raise
        return bound
    say(f"MASTER_ADDR {address} cannot be bound on this machine; port {port} is open on all its networks")
    return None


def is_loopback(text: str) -> bool:
    """Whether this address reaches no other machine. A name may, but localhost."""
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return text == "localhost"
