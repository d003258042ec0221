"""Copies of offloaded activations, in the order of a rank's actions."""

from __future__ import annotations

from heterodyne.cost.step import RankCosts
from heterodyne.plan.program import Action

__all__ = ["Copies"]


class Copies:
    """Copies of one rank between its device and its host. ``left``: by stage and micro-batch the copies that outlast its forward; ``lead``:
    those back that its backward waits for.
    """

    def __init__(self, costs: RankCosts) -> None:
        self._costs = costs
        self.left: dict[tuple[int, int | None], int] = {}
        self.lead: dict[tuple[int, int | None], int] = {}

    def leaving_s(self, action: Action) -> float:
        seconds = self._costs.stages[action.stage].leaving_s
        return seconds[action.index or 0] if seconds else 0.0

    def reload_s(self, action: Action) -> tuple[float, float]:
        stage, index = self._costs.stages[action.stage], action.index or 0
        return stage.lead_s[index], max(0.0, stage.reload_s[index] - stage.lead_s[index])

    def awaited(self, action: Action) -> tuple[int, ...]:
        """What a backward waits for."""
        if not self.lead or action.kind not in ("B", "I"):
            return ()
        task = self.lead.get((action.stage, action.index))
        return () if task is None else (task,)
