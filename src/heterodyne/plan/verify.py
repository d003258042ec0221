"""Whether a program does what a step must do, whoever made it. All violations are told, not the first one.

A program is correct if every rank runs each of its micro-batches forward and then backward, reduces each gradient
bucket once after its last backward, and updates once, last; and if ranks that meet in collectives meet in one order, since two
ranks that wait for each other in different collectives wait for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from heterodyne.errors import PlanError
from heterodyne.plan.program import Action, Program

__all__ = ["collective_order", "program_violations", "require_runnable"]


def program_violations(program: Program, micro_batches: Sequence[int | None], buckets: int) -> tuple[str, ...]:
    """Every rule that the program breaks, as sentences; none if it can run.

    Args:
        micro_batches: how many each rank has to run; None for an idle rank, which must have no action at all.
        buckets: how many gradient buckets every rank that is not idle has to reduce, also one without a micro-batch.
    """
    broken = []
    if len(micro_batches) != len(program.ranks):
        broken.append(f"it has {len(program.ranks)} ranks, the cluster has {len(micro_batches)}: lower the plan again")
    for rank, (actions, count) in enumerate(zip(program.ranks, micro_batches, strict=False)):
        if count is None:
            broken += [f"rank {rank} is idle, yet runs {actions[0]}: give an idle rank no action"] if actions else []
            continue
        broken += [
            f"rank {rank} {fault}"
            for fault in (*_order(actions, count), *_reductions(actions, buckets), *_end(actions))
        ]
    try:
        collective_order(program)
    except PlanError as error:
        broken.append(str(error))
    return tuple(broken)


def require_runnable(program: Program, micro_batches: Sequence[int | None], buckets: int) -> None:
    """Raises PlanError that lists every violation."""
    broken = program_violations(program, micro_batches, buckets)
    if broken:
        raise PlanError("the program cannot run:\n  - " + "\n  - ".join(broken))


def collective_order(program: Program) -> tuple[tuple[Action, tuple[int, ...]], ...]:
    """Each collective with its ranks, in an order that agrees with that of every rank. Raises PlanError if there is none."""
    ranks: dict[Action, list[int]] = {}
    before: TopologicalSorter[Action] = TopologicalSorter()
    for rank, actions in enumerate(program.ranks):
        collectives = [action for action in dict.fromkeys(actions) if action.kind == "REDUCE_GRAD"]
        for action in collectives:
            ranks.setdefault(action, []).append(rank)
            before.add(action)
        for earlier, later in pairwise(collectives):
            before.add(later, earlier)
    try:
        return tuple((action, tuple(ranks[action])) for action in before.static_order())
    except CycleError as error:
        cycle = " -> ".join(str(action) for action in error.args[1])
        raise PlanError(
            f"ranks would wait for each other for ever, as they meet in different orders: {cycle}; "
            "put REDUCE_GRAD in the same order on every rank"
        ) from error


def _order(actions: Sequence[Action], count: int) -> list[str]:
    """Each micro-batch once forward, then once backward."""
    broken = []
    seen = Counter(action for action in actions if action.kind in ("F", "B"))
    place = {action: number for number, action in reversed(list(enumerate(actions)))}  # of the first of each
    stages = sorted({action.stage for action in actions}) or [0]
    for stage in stages:
        for index in range(count):
            forward, backward = Action(stage, "F", index), Action(stage, "B", index)
            broken += [
                f"runs {action} {seen[action]} times: each micro-batch runs once"
                for action in (forward, backward)
                if seen[action] != 1
            ]
            if seen[forward] and seen[backward] and place[forward] > place[backward]:
                broken.append(f"runs {backward} before {forward}: a backward needs its forward")
    broken += [
        f"runs {action}, but has {count} micro-batches: remove it"
        for action in seen
        if action.index is None or action.index >= count
    ]
    return broken


def _reductions(actions: Sequence[Action], buckets: int) -> list[str]:
    """Each bucket once, after the last backward."""
    seen = Counter(action.index for action in actions if action.kind == "REDUCE_GRAD")
    broken = [
        f"reduces bucket {index} {seen[index]} times: every rank reduces each bucket once, also without a share"
        for index in range(buckets)
        if seen[index] != 1
    ]
    broken += [
        f"reduces bucket {index}, but there are {buckets}: remove it"
        for index in seen
        if index is None or index >= buckets
    ]
    last_backward = max((place for place, action in enumerate(actions) if action.kind == "B"), default=0)
    broken += [
        f"reduces bucket {action.index} before its last backward, {actions[last_backward]}: gradients are not complete there"
        for action in actions[:last_backward]
        if action.kind == "REDUCE_GRAD"
    ]
    return broken


def _end(actions: Sequence[Action]) -> list[str]:
    """At most one CLIP, behind every reduction; one STEP, last."""
    broken = []
    kinds = [action.kind for action in actions]
    if kinds.count("STEP") != 1:
        broken.append(f"updates {kinds.count('STEP')} times: a step has one STEP")
    if "STEP" in kinds and kinds[-1] != "STEP":
        broken.append(f"runs {actions[-1]} after STEP: STEP is the last action")
    if kinds.count("CLIP") > 1:
        broken.append(f"clips {kinds.count('CLIP')} times: at most once a step")
    if "CLIP" in kinds:
        late = [action for action in actions[kinds.index("CLIP") :] if action.kind not in ("CLIP", "STEP")]
        broken += [f"clips before {action}: the norm is known only after every reduction" for action in late]
    return broken
