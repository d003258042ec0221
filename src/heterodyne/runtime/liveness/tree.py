"""Who reads the signs of life of whom: each worker those of a few, and what it hands on of theirs has a bound, whatever their number.

The ranks are a tree with rank 0 at its root. A worker reads what its children and its parent say. With its own sign of life it hands on
those of its subtree from which a fault between any two ranks is found: the root judges as if it had read them all, a few rounds later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from heterodyne.runtime.liveness.failure_detector import Heartbeat

__all__ = ["Report", "children", "neighbours", "telling"]

_FAN_OUT = 8
_MOST_CALLS = 4


def children(rank: int, size: int) -> range:
    return range(min(size, _FAN_OUT * rank + 1), min(size, _FAN_OUT * rank + _FAN_OUT + 1))


def neighbours(rank: int, size: int) -> list[int]:
    """Whose reports a worker reads: its parent's and those of its children."""
    return [*([(rank - 1) // _FAN_OUT] if rank else []), *children(rank, size)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a worker writes once an interval.

    Args:
        own: its sign of life.
        others: those of its subtree that tell of a fault, by rank.
        heard: how many workers have been heard of, itself and those of its subtree.
    """

    own: Heartbeat
    others: Mapping[int, Heartbeat]
    heard: int

    @classmethod
    def load(cls, text: str | bytes) -> Report:
        own, heard, others = json.loads(text)
        return cls(own=Heartbeat.of(own), heard=heard, others={rank: Heartbeat.of(fields) for rank, fields in others})

    def dump(self) -> str:
        others = [(rank, heartbeat.fields()) for rank, heartbeat in self.others.items()]
        return json.dumps((self.own.fields(), self.heard, others), separators=(",", ":"))


def telling(heartbeats: Mapping[int, Heartbeat]) -> dict[int, Heartbeat]:
    """Those from which the others' faults would be found as well: who waits longest, works longest, waits least, is furthest behind, has
    raised an error, has left, and one for each call that they are in or after.
    """
    there = {rank: b for rank, b in heartbeats.items() if b.kind != "left"}
    left = {rank: b for rank, b in heartbeats.items() if b.kind == "left"}
    waiting = {rank: b for rank, b in there.items() if b.kind == "wait"}
    working = {rank: b for rank, b in there.items() if b.kind != "wait"}

    def most(of: Mapping[int, Heartbeat], key: Callable[[Heartbeat], float]) -> list[int]:
        return [max(of, key=lambda rank: key(of[rank]))] if of else []

    calls = {(b.calls.number, b.calls.latest, b.calls.inside): rank for rank, b in there.items()}
    by_number = [calls[key] for key in sorted(calls)]
    raised = {rank: b for rank, b in there.items() if b.calls.raised}
    chosen = [
        *most(waiting, lambda b: b.age_s),
        *most(working, lambda b: b.age_s - b.limit_s),
        *most(waiting, lambda b: b.limit_s - b.age_s),
        *most(there, lambda b: -b.count),
        *most(raised, lambda b: b.calls.raised),
        *most(left, lambda b: -b.calls.number),
        *by_number[: _MOST_CALLS // 2],
        *by_number[-_MOST_CALLS // 2 :],
    ]
    return {rank: heartbeats[rank] for rank in dict.fromkeys(chosen)}
