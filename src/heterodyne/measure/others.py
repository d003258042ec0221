"""What others take of a host's cores while its devices are measured: what is measured beside them holds as long as they stay."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

__all__ = ["Cores", "busy", "taken_by_others"]

_BUSY = 0.1
"""Of the cores. With more of them idle nobody waits for one, and with less of them taken by others a trial sees what they cost."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """Seconds of all cores of a host, since some moment: ``worked_s`` by whomever, also by those on the other side of a hypervisor, and
    ``idle_s``; ``own_s``: of them by this process.
    """

    worked_s: float
    idle_s: float
    own_s: float

    @classmethod
    def now(cls) -> Cores:
        times = psutil.cpu_times()._asdict()
        idle_s = times["idle"] + times.get("iowait", 0.0)
        # The kernel counts guests twice.
        worked_s = sum(times.values()) - idle_s - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        return cls(worked_s=worked_s, idle_s=idle_s, own_s=time.process_time())

    def since(self, before: Cores) -> Cores:
        return Cores(
            worked_s=self.worked_s - before.worked_s,
            idle_s=self.idle_s - before.idle_s,
            own_s=self.own_s - before.own_s,
        )


def taken_by_others(nodes: Sequence[str], seen: Sequence[Cores]) -> dict[str, float]:
    """The part of each host's cores that none of our workers had, of hosts whose workers had to share them: 0 where cores were idle.

    Args:
        nodes: the host of each rank.
        seen: what each rank has seen in the same time.
    """
    found = {}
    for node in dict.fromkeys(nodes):
        of_node = [cores for own, cores in zip(nodes, seen, strict=True) if own == node]
        worked_s, idle_s = (sum(getattr(c, name) for c in of_node) / len(of_node) for name in ("worked_s", "idle_s"))
        all_s = worked_s + idle_s
        others_s = worked_s - sum(cores.own_s for cores in of_node)
        found[node] = max(0.0, others_s / all_s) if all_s > 0 and idle_s < _BUSY * all_s else 0.0
    return found


def busy(taken: Mapping[str, float]) -> list[str]:
    """A sentence for each host of which others take so much that a plan will be off."""
    return [
        f"{'this machine' if len(taken) == 1 else node} is busy ({part:.0%} of its cores are taken by others): the plan will be off"
        for node, part in taken.items()
        if part > _BUSY
    ]
