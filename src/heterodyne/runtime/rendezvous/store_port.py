"""A port of loopback for torch's store, which has no password: only connections that this process makes by `StorePort.connect` reach it.

The kernel drops everybody else's. A filter on the listening socket lets in nobody but the one local port that this process holds while it
connects. Anybody on the machine can read which ports are open, so that a port cannot be kept secret.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import socket
import struct
import sys
import threading
from collections.abc import Callable

import psutil

__all__ = ["LOOPBACK", "StorePort", "is_loopback", "is_own", "listening_socket"]

LOOPBACK = "127.0.0.1"
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux, which the socket module does not name
_INSTRUCTION = struct.Struct("=HBBI")  # of a classic BPF program: code, jumps if true and if false, operand
_NETWORK = 0xFFF00000  # where the header of IP begins
_PASS, _DROP = 0xFFFFFFFF, 0
_CONNECTED_S = 5.0


class StorePort:
    """Bound, for torch's store to listen at. ``guarded``: the kernel keeps others out; those of Linux do. Raises OSError."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._lock = threading.Lock()
        self.guarded = sys.platform == "linux"
        try:
            self._let_in(0)
        except OSError:  # a sandbox that has no such filters
            self.guarded = False
        self._socket.bind((LOOPBACK, 0))
        self.number = int(self._socket.getsockname()[1])

    def descriptor(self) -> int:
        """Another one of the socket, for its new owner."""
        return self._socket.dup().detach()

    def connect(self) -> socket.socket:
        """A connection to the store. Raises OSError."""
        made = socket.socket()
        try:
            made.settimeout(_CONNECTED_S)
            made.bind((LOOPBACK, 0))
            with self._lock:
                self._let_in(made.getsockname()[1])
                try:
                    made.connect((LOOPBACK, self.number))
                finally:
                    self._let_in(0)
        except BaseException:
            made.close()
            raise
        return made

    def close(self) -> None:
        self._socket.close()

    def _let_in(self, port: int) -> None:
        """New connections come from that port of loopback only; 0: from nowhere."""
        if not self.guarded:
            return
        program = (
            (0x30, 0, 0, 13),  # the flags of the TCP segment
            (0x45, 0, 4, 0x02),  # not SYN: it belongs to a connection that was let in
            (0x28, 0, 0, 0),  # its source port
            (0x15, 0, 3, port),
            (0x20, 0, 0, _NETWORK + 12),
            (0x15, 0, 1, 0x7F000001),
            (0x06, 0, 0, _PASS),
            (0x06, 0, 0, _DROP),
        )
        code = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*each) for each in program))
        self._socket.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code))
        )


def is_own(peer: tuple[str, int], here: tuple[str, int]) -> bool:
    """Return whether the other end of a connection that was accepted ``here`` is this process: anybody on the machine can connect to its
    ports."""
    own = psutil.Process().net_connections("tcp")
    return any((_v4(each.laddr), _v4(each.raddr)) == (peer, here) for each in own if each.raddr)


def _v4(end: tuple[str, int]) -> tuple[str, int]:
    """torch's clients have sockets of IPv6, where an address of IPv4 is written otherwise."""
    return end[0].removeprefix("::ffff:"), end[1]


def listening_socket(address: str, port: int, *, one_machine: bool, say: Callable[[str], None]) -> socket.socket | None:
    """A socket bound to that address, or None where one must listen on every network; ``say`` hears so.

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
    """Return whether this address reaches no other machine. A name may, but localhost."""
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return text == "localhost"
