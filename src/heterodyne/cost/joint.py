"""Seconds of what several devices do together, where they have to wait for each other in between.

Between two exchanges each member computes for itself; an exchange begins when the last of them has come to it, and blocks all until
it is over. So the times of the members do not add up device by device: between any two exchanges the slowest counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Step", "joint_s"]

Step: TypeAlias = tuple[float, ...] | float
"""Either the seconds in which each member computes, or those of an exchange."""


def joint_s(steps: Iterable[Step]) -> float:
    """From the moment at which all members begin until the last is done.

    >>> joint_s([(1.0, 3.0), 0.5, (2.0, 1.0), (2.0, 1.0)])
    7.5
    """
    total = 0.0
    reached: tuple[float, ...] = ()  # by each member since they last met
    for step in steps:
        if not isinstance(step, tuple):
            total += max(reached, default=0.0) + step
            reached = ()
        elif reached:
            reached = tuple(a + b for a, b in zip(reached, step, strict=True))
        else:
            reached = step
    return total + max(reached, default=0.0)
