"""The workers of a job as they know each other: rank, host, process."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import psutil

__all__ = ["Member"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One worker.

    Args:
        machine: equal for two workers if and only if each can see the other's process by its number.
        world_size: how many workers it expects.
        listens: an address and a port where it listens while the workers meet.
        software: the versions of what it runs.
    """

    rank: int
    host: str
    pid: int
    machine: str
    world_size: int = 0
    listens: str = ""
    software: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def myself(cls, rank: int, *, world_size: int, listens: str, software: Mapping[str, str]) -> Member:
        return cls(
            rank=rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=_machine(),
            world_size=world_size,
            listens=listens,
            software=dict(software),
        )

    @classmethod
    def load(cls, text: str | bytes) -> Member:
        """Return the member of an entry, which another version of this package may have written."""
        known = {of.name for of in fields(cls)}
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})

    def dump(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"

    def process_status(self) -> str | None:
        """Return what the operating system says of the process (``running``, ``stopped``...); None if it is gone.

        Only for a member whose `machine` is the caller's.
        """
        try:
            status = str(psutil.Process(self.pid).status())
        except psutil.NoSuchProcess:
            return None
        except OSError:  # this process has too many files open to look
            return "unknown"
        return None if status in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD} else status

    def processor_s(self) -> float:
        """Seconds of processor that the process has had; the same condition holds."""
        try:
            times = psutil.Process(self.pid).cpu_times()
            return float(times.user + times.system)
        except (psutil.Error, OSError):
            return 0.0


def _machine() -> str:
    """Containers can share a host name and yet not see each other's processes, so the name alone does not do."""
    if sys.platform != "linux":
        return socket.gethostname()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
