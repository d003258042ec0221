"""The most that a rank has in the memory of its host of what its passes keep there."""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.cost.step import RankCosts
from heterodyne.plan.program import Action

__all__ = ["host_peak"]


def host_peak(actions: Sequence[Action], costs: RankCosts | None) -> int:
    """Bytes of activations that wait there at a time: from the forward of a micro-batch to the end of its backward, or its first half."""
    if costs is None:
        return 0
    alive = most = 0
    for action in actions:
        own = costs.stages[action.stage].host_bytes if action.kind in ("F", "B", "I") else ()
        if own and action.index is not None:
            alive += own[action.index] if action.kind == "F" else -own[action.index]
            most = max(most, alive)
    return most
