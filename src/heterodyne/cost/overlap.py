"""Time of several devices whose micro-batch runs as two halves, so that the collectives of one half overlap with the computing of the
other.

The halves take turns (`heterodyne.frontend.in_turns`). Each member goes on as soon as it has handed over its messages; a
collective starts when its last member has reached it and the links are free, and a half waits for its own collective when its turn
comes. Links are taken by what is transferred, not by its latency (the gap and the latency of LogP, Culler et al., PPoPP 1993).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeAlias

from heterodyne.cost.joint_time import Step

__all__ = ["Crossing", "OverlapStep", "overlapped_s"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A collective that can overlap with computing.

    Args:
        own_s: seconds in which each member is busy with it.
        latency_s: seconds until its messages move; those of another collective may move meanwhile.
        transfer_s: seconds in which its messages fill the network.
    """

    own_s: float
    latency_s: float
    transfer_s: float

    @property
    def waited_s(self) -> float:
        """Seconds for members that wait for it."""
        return self.own_s + self.latency_s + self.transfer_s


OverlapStep: TypeAlias = Step | Crossing
"""What each member computes, an exchange for which both halves wait, or one beside which the other half computes."""


@dataclass
class _Turn:
    """The steps of a half in one turn, and the collective that it starts."""

    steps: list[Step] = field(default_factory=list)
    sends: list[Crossing] = field(default_factory=list)


def overlapped_s(halves: Sequence[Iterable[OverlapStep]], members: int) -> float:
    """Seconds from the moment at which all members begin until the last one is done.

    >>> compute, exchange = (2.0, 1.0), Crossing(own_s=0.0, latency_s=0.0, transfer_s=1.0)
    >>> overlapped_s([[compute, exchange, compute], [compute, exchange, compute]], 2)
    8.0
    """
    reached = [0.0] * members
    wires = 0.0
    arrived = [0.0] * len(halves)
    for turns in zip_longest(*map(_turns, halves), fillvalue=_Turn()):
        for half, turn in enumerate(turns):
            reached = [max(moment, arrived[half]) for moment in reached]
            for step in turn.steps:
                if isinstance(step, tuple):
                    reached = [a + b for a, b in zip(reached, step, strict=True)]
                else:
                    wires = max(*reached, wires) + step
                    reached = [wires] * members
            for sent in turn.sends:
                reached = [moment + sent.own_s for moment in reached]
                wires = max(*reached, wires) + sent.transfer_s
                arrived[half] = wires + sent.latency_s
    return max(*reached, *arrived)


def _turns(steps: Iterable[OverlapStep]) -> list[_Turn]:
    turns = [_Turn()]
    for step in steps:
        if isinstance(step, Crossing):
            turns[-1].sends.append(step)
        else:
            if turns[-1].sends:
                turns.append(_Turn())
            turns[-1].steps.append(step)
    return turns
