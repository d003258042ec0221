"""When the parameters of a stage are gathered, and let go of, where the devices of the stage share them out (ZeRO-3).

They are needed from the first to the last of its forwards, and from the first to the last of its backwards. Where the rank runs other
stages between (breadth first, as GPipe does with several stages a place), they are let go of meanwhile; else they stay. So a step
gathers each stage at most twice, however many micro-batches it has ("layered gradient accumulation", Lamy-Poirier, "Breadth-first pipeline
parallelism", MLSys 2023). Each gather is started one stage ahead, so that it is behind the passes of that. The gradients of a stage are
reduced right behind its last backward: then none is larger than two stages, and all devices start all exchanges in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterodyne.plan.program import Action

__all__ = ["with_unsharding"]


@dataclass(frozen=True, kw_only=True)
class _Use:
    """Actions ``[first, last]`` of a list need the parameters of a stage, for the ``number``-th time."""

    stage: int
    number: int
    first: int
    last: int


def with_unsharding(actions: Sequence[Action], readers: Mapping[int, Sequence[int]]) -> tuple[Action, ...]:
    """The passes of a rank, with what gathers parameters, lets go of them and reduces gradients.

    ``readers``: of each bucket, in the order of the reductions, the stages of the rank that read it.
    """
    if not actions:
        return tuple(Action(0, "SCATTER", bucket) for bucket in readers)
    before: dict[int, list[Action]] = {}
    behind: dict[int, list[Action]] = {}
    earlier: _Use | None = None
    ended: dict[int, int] = {}
    for use in sorted(_uses(actions), key=lambda use: use.first):
        ahead = max(earlier.first if earlier is not None else 0, ended.get(use.stage, -1) + 1)
        before.setdefault(ahead, []).append(Action(use.stage, "UNSHARD", use.number))
        behind.setdefault(use.last, []).append(Action(use.stage, "RESHARD", use.number))
        earlier, ended[use.stage] = use, use.last
    last = {action.stage: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
    complete = 0
    for bucket, stages in readers.items():
        complete = max(complete, *(last[stage] for stage in stages)) if stages else len(actions) - 1
        behind.setdefault(complete, []).append(Action(0, "SCATTER", bucket))
    return tuple(
        each
        for place, action in enumerate(actions)
        for each in (*before.get(place, ()), action, *behind.get(place, ()))
    )


def _uses(actions: Sequence[Action]) -> list[_Use]:
    found = []
    for stage in dict.fromkeys(action.stage for action in actions):
        forwards = [place for place, action in enumerate(actions) if action.stage == stage and action.kind == "F"]
        backwards = [place for place, a in enumerate(actions) if a.stage == stage and a.kind in ("B", "I", "W", "R")]
        first, last = min(forwards), max(backwards)
        turn, again = max(forwards), min(backwards)
        others = any(action.stage != stage for action in actions[turn:again])
        if turn < again and others:
            found += [
                _Use(stage=stage, number=0, first=first, last=turn),
                _Use(stage=stage, number=1, first=again, last=last),
            ]
        else:
            found.append(_Use(stage=stage, number=0, first=first, last=last))
    return found
