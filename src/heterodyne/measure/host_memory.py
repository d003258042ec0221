"""How much host memory a process may use: what the machine has, and what control groups (v1 or v2) leave of it.

A limit holds for everything under its control group, so a limit that several workers stand under is divided between them.
That is what tells the limit of a container, which all share, from the limit of one worker alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["HostMemory", "read_host_memory", "round_down", "worker_memory"]

_UNLIMITED = 2**60  # version 1 writes the largest multiple of the page size for "no limit"


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What one process can see.

    Args:
        total_bytes: of the machine.
        limits: (control group, bytes) of each group with a limit that the process stands under.
    """

    total_bytes: int
    limits: tuple[tuple[str, int], ...] = ()


def read_host_memory(
    pid: int | str = "self", *, proc: Path = Path("/proc"), total_bytes: int | None = None
) -> HostMemory:
    """Return what a process can see of the machine's memory; no limits where there are no control groups (macOS, say)."""
    total = psutil.virtual_memory().total if total_bytes is None else total_bytes
    try:
        lines = (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "self" / "mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return HostMemory(total_bytes=total)
    limits = dict(limit for line in lines for limit in _limits(line, mounts))
    return HostMemory(total_bytes=total, limits=tuple(sorted(limits.items())))


def worker_memory(own: HostMemory, siblings: Sequence[HostMemory]) -> int:
    """The bytes of one worker among the CPU workers of its host.

    The machine's memory, and each limit, is divided by the number of workers that stand under it; the least counts. What the machine
    has is rounded down. A limit is what somebody has set, so it counts to the last byte.
    """
    shares = [round_down(own.total_bytes // (1 + len(siblings)))]
    for group, limit in own.limits:
        under = 1 + sum(any(group == other for other, _ in sibling.limits) for sibling in siblings)
        shares.append(limit // under)
    return min(shares)


def host_context_bytes() -> int:
    """Return what this process occupies now: interpreter, libraries, and what capturing and measuring keep."""
    return int(psutil.Process().memory_info().rss)


def round_down(size: int) -> int:
    """The seven leading binary digits: what a kernel update or a driver takes now and then does not change them."""
    unit = 1 << max(0, size.bit_length() - 7)
    return size // unit * unit


def _limits(line: str, mounts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The limits along one line of ``/proc/PID/cgroup``: ``hierarchy:controllers:path``."""
    _, controllers, path = line.split(":", 2)
    if controllers == "":
        kind, name = "cgroup2", "memory.max"
    elif "memory" in controllers.split(","):
        kind, name = "cgroup", "memory.limit_in_bytes"
    else:
        return
    for mount in mounts:
        _, place, filesystem, options, *_ = mount.split(" ")
        if filesystem != kind or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        # Inside a container the path may be one that only the host can see; the mount itself then is the container's group.
        folder = Path(place)
        for part in ("", *Path(path).parts[1:]):
            folder = folder / part
            try:
                text = (folder / name).read_text(encoding="ascii").strip()
            except OSError:
                continue
            if text != "max" and int(text) < _UNLIMITED:
                yield str(folder), int(text)
