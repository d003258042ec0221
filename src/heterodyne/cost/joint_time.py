"""Time of several devices that synchronise in between.

Between two collectives each member computes for itself; a collective begins when the last member has reached it, and blocks all of them.
So the slowest member counts between any two collectives.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

__all__ = ["Step", "joint_s"]

Step: TypeAlias = tuple[float, ...] | float
"""Either the seconds in which each member computes, or those of an exchange."""


def joint_s(steps: Iterable[Step]) -> float:
    """Seconds from the moment at which all members begin until the last is done.

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
