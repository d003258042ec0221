"""Which ranks see one and the same directory under a path: all of them on a shared disk, else those of a host.

The kernel of a host knows which of its processes do. Between hosts a file decides: the first rank of each leaves one there, and looks for
those of the others.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from heterodyne.errors import CheckpointError
from heterodyne.runtime.comm.agreement import Agreement

__all__ = ["Disks"]

T = TypeVar("T")

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SEEN_WITHIN_S = 1.0
"""Names of which nobody has asked before are in no cache; this is for file systems that keep whole directories."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Disks:
    """The directories that are behind one path.

    Args:
        ranks: of each directory, those that see it; that of rank 0 first.
        hosts: of each directory, the names of their hosts.
        agreement: of all ranks.
    """

    ranks: tuple[tuple[int, ...], ...]
    hosts: tuple[tuple[str, ...], ...]
    agreement: Agreement

    @classmethod
    def behind(cls, directory: Path, agreement: Agreement) -> Disks:
        """Find them; the directory is made where it is not there. Every rank calls this.

        Raises CheckpointError if it cannot be made, or nothing can be written there, on any host.
        """
        host = socket.gethostname()
        if agreement.size == 1:
            return cls(ranks=((0,),), hosts=((host,),), agreement=agreement)
        views = agreement.gather_or_raise(lambda: _view(directory, host))
        firsts = [views.index(view) for view in views]
        lowest = _lowest_seen(directory, sorted(set(firsts)), agreement)
        of_rank = [lowest[first] for first in firsts]
        ranks = tuple(
            tuple(rank for rank, disk in enumerate(of_rank) if disk == first) for first in sorted(set(of_rank))
        )
        hosts = tuple(tuple(dict.fromkeys(views[rank][0] for rank in each)) for each in ranks)
        return cls(ranks=ranks, hosts=hosts, agreement=agreement)

    @property
    def own(self) -> int:
        """The number of that which this rank sees."""
        return self.of_rank(self.agreement.rank)

    @property
    def firsts(self) -> list[int]:
        """The rank that acts for each."""
        return [ranks[0] for ranks in self.ranks]

    def of_rank(self, rank: int) -> int:
        """Return the number of that which a rank sees."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def on_each(self, do: Callable[[], T]) -> list[T]:
        """Have it done once for each, and return the results, in their order, on every rank; or raise the first HeterodyneError of any."""
        acts = self.agreement.rank in self.firsts
        found = self.agreement.gather_or_raise(lambda: [do()] if acts else [])
        return [result for results in found for result in results]

    def told(self, number: int) -> str:
        """Return the hosts of one of them, for people."""
        return ", ".join(self.hosts[number])


def _view(directory: Path, host: str) -> tuple[str, str, int, int]:
    """What is the same for two processes of a host if, and only if, they see the same directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise CheckpointError(
            f"the directory {directory.absolute()} cannot be made on {host} ({error.strerror}); choose another"
        ) from error
    boot = ""
    with suppress(OSError):
        boot = _BOOT.read_text().strip()
    return host, boot, found.st_dev, found.st_ino


def _lowest_seen(directory: Path, firsts: Sequence[int], agreement: Agreement) -> dict[int, int]:
    """Return, of each of these ranks, the lowest of them that sees the same directory."""
    if len(firsts) == 1:
        return {firsts[0]: firsts[0]}
    name = agreement.on_rank0(lambda: f".seen-{secrets.token_hex(8)}")
    signs = {rank: directory / f"{name}-{rank}" for rank in firsts}
    own = signs.get(agreement.rank)

    def write() -> None:
        try:
            if own is not None:
                own.touch()
        except OSError as error:
            raise CheckpointError(
                f"nothing can be written to {directory.absolute()} on {socket.gethostname()} ({error.strerror}); make it writable there, "
                "or choose another"
            ) from error

    def remove() -> None:
        if own is not None:
            with suppress(OSError):
                own.unlink()

    try:
        agreement.gather_or_raise(write)
        seen = agreement.gather_or_raise(lambda: None if own is None else _seen(signs))
    finally:
        agreement.gather_or_raise(remove)
    return {rank: found for rank, found in enumerate(seen) if found is not None}


def _seen(signs: dict[int, Path]) -> int:
    until_s = time.monotonic() + _SEEN_WITHIN_S
    while True:
        found = [rank for rank, sign in signs.items() if sign.exists()]
        if len(found) == len(signs) or time.monotonic() > until_s:
            return min(found)
        time.sleep(0.05)
