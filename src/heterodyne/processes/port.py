"""A port for the workers to meet at, which nobody else takes between choosing it and using it."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from heterodyne.errors import WorkerError

__all__ = ["is_free", "reserve_port"]

# Below the ports that Linux (32768) and BSD (49152) hand out to outgoing connections, so none of those can land on ours.
_FIRST, _LAST = 20_000, 32_000
_ATTEMPTS = 200


@contextmanager
def reserve_port() -> Iterator[int]:
    """A TCP port that is free now and that no other launcher of this machine takes while the block runs.

    Two launchers exclude each other by an abstract socket that bears the number of the port: the kernel removes it with
    its owner, however that ends. Where there are no such sockets (not Linux) the random choice has to suffice.

    Raises:
        WorkerError: no port could be found.
    """
    generator = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = generator.randrange(_FIRST, _LAST)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
            if not (_claim(claim, port) and is_free(port)):
                continue
            yield port
            return
    raise WorkerError(f"no free TCP port was found between {_FIRST} and {_LAST} in {_ATTEMPTS} attempts")


def _claim(claim: socket.socket, port: int) -> bool:
    try:
        claim.bind(f"\0heterodyne-port-{port}")
    except FileNotFoundError:  # abstract names do not exist on this system
        return True
    except OSError:
        return False
    return True


def is_free(port: int) -> bool:
    """Return whether a TCP port of this machine can be opened."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do, or a connection that was closed a moment ago would make the port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
