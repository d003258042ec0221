"""Memory of one rank while it runs its list: what each action adds and frees, and the most at any moment.

A forward adds what its stage keeps of the micro-batch; R adds what was not kept; a backward frees both, or in halves: I leaves what W
still needs. What comes and goes inside an action counts while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts
from heterodyne.plan.program import Action

__all__ = ["changes", "peak"]

Change = tuple[int, int]


def peak(actions: Sequence[Action], costs: RankCosts | None) -> int:
    """The most bytes at any time; 0 for an idle rank."""
    if costs is None or not actions:
        return 0
    table = _table(actions, costs)
    alive = most = 0
    for action in actions:
        if action.kind in table:
            during, after = table[action.kind][action.stage][action.index]  # type: ignore[index]  # these have one
            if alive + during > most:
                most = alive + during
            alive += after
    return costs.fixed_bytes + max(most, costs.update_bytes)


def changes(actions: Sequence[Action], costs: RankCosts) -> list[Change]:
    """For each action the bytes on top of those before it: the most while it runs, and what stays when it is over."""
    table = _table(actions, costs)
    update = (costs.update_bytes, 0)
    made = []
    for action in actions:
        if action.kind in table:
            made.append(table[action.kind][action.stage][action.index])  # type: ignore[index]
        else:
            made.append(update if action.kind in ("CLIP", "STEP") else (0, 0))
    return made


def _table(actions: Sequence[Action], costs: RankCosts) -> dict[str, dict[int, list[Change]]]:
    """The changes of the passes, by kind, stage and micro-batch."""
    again = {number: stage for number, stage in costs.stages.items() if any(stage.recomputed_bytes)}
    ahead = {(a.stage, a.index) for a in actions if a.kind == "R"} if again else set()
    made: dict[str, dict[int, list[Change]]] = {kind: {} for kind in ("F", "B", "I", "W", "R")}
    for number, stage in costs.stages.items():
        rows = [
            _of_micro_batch(stage, index, costs.workspace_bytes, (number, index) in ahead)
            for index in range(len(stage.forward_s))
        ]
        for place, of_kind in enumerate(made.values()):
            of_kind[number] = [row[place] for row in rows]
    return made


def _of_micro_batch(stage: StageCosts, index: int, space: int, ahead: bool) -> tuple[Change, ...]:
    """F, B, I, W, R of one micro-batch; ``ahead``: R comes before its backward."""
    kept, again, left = _at(stage.kept_bytes, index), _at(stage.recomputed_bytes, index), _at(stage.weight_bytes, index)
    alive = kept + (again if ahead else 0)
    during = space + _at(stage.gradient_bytes, index) + (0 if ahead else _at(stage.redone_bytes, index))
    return (
        (kept + space, kept),
        (during, -alive),
        (during + max(0, left - alive), left - alive),
        (space, -left),
        (again + space, again),
    )


def _at(values: Sequence[int], index: int) -> int:
    return values[index] if values else 0
