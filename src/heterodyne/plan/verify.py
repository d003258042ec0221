"""Whether a program does what a step must do, whoever made it. All violations are reported, not the first one.

A program is correct if every rank runs each of its micro-batches through each of its stages, forward and then backward, with
what it must receive before and what others wait for behind; reduces each gradient bucket that it shares once, after its last
backward; and updates once, last. And if it comes to its end: no rank waits for what another one does only after that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import count, pairwise, takewhile

from heterodyne.errors import PlanError
from heterodyne.plan.buckets import BUCKETS_UNDER_WAY
from heterodyne.plan.program import COLLECTIVES, REDUCTIONS, Action, ActionKind, Program
from heterodyne.plan.traffic import RankSpec

__all__ = ["collective_order", "program_violations", "require_runnable"]

_MOST_TOLD = 20
_OF_THE_RANK = (*COLLECTIVES, "RESHARD", "CLIP", "STEP")


def program_violations(program: Program, specs: Sequence[RankSpec | None]) -> tuple[str, ...]:
    """Every rule that the program breaks, as sentences; none if it can run. ``specs``: what each rank has to do, None for an idle one."""
    broken = []
    if len(specs) != len(program.ranks):
        broken.append(f"it has {len(program.ranks)} ranks, the cluster has {len(specs)}: lower the plan again")
    for rank, (actions, spec) in enumerate(zip(program.ranks, specs, strict=False)):
        if spec is None:
            broken += [f"rank {rank} is idle, yet runs {actions[0]}: give an idle rank no action"] if actions else []
            continue
        faults = (*_passes(actions, spec), *_reductions(actions, spec), *_unsharding(actions, spec), *_end(actions))
        broken += [f"rank {rank} {fault}" for fault in faults]
    try:
        collective_order(program)
    except PlanError as error:
        broken.append(str(error))
    # Ranks that lack an action would be found to wait for it, which says less.
    return tuple(broken) or tuple(_blocked(program, specs))


def require_runnable(program: Program, specs: Sequence[RankSpec | None]) -> None:
    """Raises PlanError that lists the violations."""
    broken = program_violations(program, specs)
    if broken:
        more = [f"and {len(broken) - _MOST_TOLD} more"] if len(broken) > _MOST_TOLD else []
        raise PlanError("the program cannot run:\n  - " + "\n  - ".join([*broken[:_MOST_TOLD], *more]))


def collective_order(program: Program) -> tuple[tuple[Action, tuple[int, ...]], ...]:
    """Each collective with its ranks, in an order that agrees with that of every rank. Raises PlanError if there is none."""
    ranks: dict[Action, list[int]] = {}
    before: TopologicalSorter[Action] = TopologicalSorter()
    for rank, actions in enumerate(program.ranks):
        collectives = [action for action in actions if action.kind in COLLECTIVES]
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
            f"ranks would wait for each other forever, as they meet in different orders: {cycle}; "
            "put REDUCE_GRAD, SCATTER, GATHER and UNSHARD in the same order on every rank"
        ) from error


def _passes(actions: Sequence[Action], spec: RankSpec) -> Iterator[str]:
    """Each micro-batch through each stage: what it needs, forward, backward (whole, or I and W), and what others need."""
    seen = Counter(action for action in actions if action.kind not in _OF_THE_RANK)
    place = {action: number for number, action in reversed(list(enumerate(actions)))}  # of the first of each
    for stage in spec.stages:
        for index in range(spec.micro_batches):
            chain = _chain(
                stage, index, spec, split=bool(seen[Action(stage, "I", index)] or seen[Action(stage, "W", index)])
            )
            for action in chain:
                if seen.pop(action, 0) != 1:
                    count = actions.count(action)
                    yield f"runs {action} {count} times: each micro-batch runs once"
            for earlier, later in pairwise(chain):
                if earlier in place and later in place and place[earlier] > place[later]:
                    yield f"runs {later} before {earlier}: {_needs(later, earlier)}"
            backward = next(action for action in chain if action.kind in ("B", "I"))
            yield from _between(Action(stage, "F", index), backward, place, seen, hosted=stage in spec.hosted)
    for action in seen:
        if action.stage not in spec.stages:
            yield f"runs {action}, but holds {_listed(spec.stages)}: remove it"
        elif action.index is None or action.index >= spec.micro_batches:
            yield f"runs {action}, but has {spec.micro_batches} micro-batches: remove it"
        else:
            yield f"runs {action}, which nobody needs: remove it"


def _between(
    forward: Action, backward: Action, place: Mapping[Action, int], seen: Counter[Action], *, hosted: bool
) -> Iterator[str]:
    """Yield what may stand between a forward and its backward; it is taken out of ``seen``."""
    kinds: tuple[ActionKind, ...] = ("R", "OFFLOAD", "RELOAD") if hosted else ("R",)
    before = place.get(forward, -1)
    for each in (Action(forward.stage, kind, forward.index) for kind in kinds):
        times = seen.pop(each, 0)
        if times > 1:
            yield f"runs {each} {times} times: once is enough"
        if times and not before < place[each] < place.get(backward, place[each] + 1):
            yield f"runs {each} out of its place: it stands between the forward and the backward"
        if times and each.kind == "RELOAD" and place[each] < place.get(replace(each, kind="OFFLOAD"), 0):
            yield f"runs {each} before {replace(each, kind='OFFLOAD')}: nothing has left there"


def _chain(stage: int, index: int, spec: RankSpec, *, split: bool) -> list[Action]:
    """Return what must be done with one micro-batch, in order."""
    traffic = spec.traffic
    kinds: list[ActionKind] = ["RECV_F"] if stage in traffic.receives else []
    kinds += ["F"]
    kinds += ["SEND_F"] if stage in traffic.sends else []
    kinds += ["RECV_B"] if stage in traffic.gets_back else []
    kinds += ["I" if split else "B"]
    kinds += ["SEND_B"] if stage in traffic.gives_back else []
    kinds += ["W"] if split else []
    return [Action(stage, kind, index) for kind in kinds]


def _needs(later: Action, earlier: Action) -> str:
    what = {"F": "a backward needs its forward", "I": "the gradients of weights need those of the inputs"}
    return (
        what.get(earlier.kind, f"it needs what {earlier} brings") if later.kind in ("B", "I", "W") else "put it behind"
    )


def _listed(stages: Sequence[int]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _reductions(actions: Sequence[Action], spec: RankSpec) -> Iterator[str]:
    """Each bucket once, after the last backward; where state is sharded, gathered once too."""
    wanted, other = reversed(REDUCTIONS) if spec.zero else REDUCTIONS
    if any(action.kind == other for action in actions):
        yield f"runs {other}, and its state is {'' if spec.zero else 'not '}sharded: put {wanted} in its place"
    gathered = Counter(action.index for action in actions if action.kind == "GATHER")
    times = int(spec.zero in (1, 2))
    for index in spec.buckets:
        if gathered[index] != times:
            often = "every owner gathers each bucket once" if times else "none is gathered behind the update"
            yield f"gathers bucket {index} {gathered[index]} times: {often}"
    seen = Counter(action.index for action in actions if action.kind == wanted)
    for index in spec.buckets:
        if seen[index] != 1:
            yield f"reduces bucket {index} {seen[index]} times: every owner reduces each bucket once, also without a share"
    for bucket in seen:
        if bucket not in spec.buckets:
            yield f"reduces bucket {bucket}, but shares {', '.join(map(str, spec.buckets)) or 'none'}: remove it"
    order = [action for action in actions if action.kind == wanted and action.index in spec.buckets]
    for earlier, later in pairwise(order):
        if (later.index or 0) < (earlier.index or 0):
            yield f"runs {later} behind {earlier}: buckets are reduced in the order of their numbers on every rank"
    last = {action.stage: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
    for place, action in enumerate(actions):
        if action.kind == wanted and action.index in seen:
            of = spec.readers.get(action.index or 0) or tuple(last)
            complete = max((last[stage] for stage in of if stage in last), default=-1)
            if place < complete:
                yield f"reduces bucket {action.index} before its last backward, {actions[complete]}: gradients are not complete there"


def _unsharding(actions: Sequence[Action], spec: RankSpec) -> Iterator[str]:
    """Yield what is wrong with the gathers of sharded parameters: each pass of a stage needs them."""
    gathered: set[int] = set()
    for action in actions:
        kind, bucket = action.kind, action.index or 0
        if kind in ("UNSHARD", "RESHARD"):
            if spec.zero < 3:
                yield f"runs {action}, and its parameters are not sharded: remove it"
            elif bucket not in spec.buckets:
                yield f"runs {action}, but shares {', '.join(map(str, spec.buckets)) or 'none'}: remove it"
            elif (kind == "RESHARD") != (bucket in gathered):
                is_ = (
                    "gathered already: remove it, or put RESHARD before it"
                    if bucket in gathered
                    else "sharded there: remove it"
                )
                yield f"runs {action}, and the parameters of bucket {bucket} are {is_}"
            gathered ^= {bucket}
        elif spec.zero > 2 and kind in ("F", "B", "I", "R"):
            for each, stages in spec.readers.items():
                if action.stage in stages and each not in gathered:
                    yield f"runs {action} while the parameters of bucket {each} are sharded: put UNSHARD before it"
    if spec.zero > 2 and gathered:
        yield f"keeps the parameters of buckets {', '.join(map(str, sorted(gathered)))} gathered: put RESHARD behind the last pass"


def _blocked(program: Program, specs: Sequence[RankSpec | None]) -> list[str]:
    """The ranks that never come to their end, and what each waits for. Sends wait for nobody."""
    holders: dict[tuple[int, int], list[int]] = {}  # (pipeline, stage): ranks
    for rank, spec in enumerate(specs):
        for stage in spec.stages if spec is not None else ():
            holders.setdefault((spec.pipeline, stage), []).append(rank)  # type: ignore[union-attr]  # the loop is empty for None
    owners: dict[int, list[int]] = {}  # of parameters that are sharded, by bucket: ranks
    for rank, spec in enumerate(specs):
        for bucket in spec.buckets if spec is not None and spec.zero > 1 else ():
            owners.setdefault(bucket, []).append(rank)
    done: list[set[Action]] = [set() for _ in program.ranks]
    reached = [0] * len(program.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program.ranks):
            while reached[rank] < len(actions) and not _awaited(
                actions[reached[rank]], specs[rank], holders, done, owners, done[rank]
            ):
                done[rank].add(actions[reached[rank]])
                reached[rank] += 1
                moved = True
    broken = []
    for rank, actions in enumerate(program.ranks):
        if reached[rank] < len(actions):
            action = actions[reached[rank]]
            who, what = _awaited(action, specs[rank], holders, done, owners, done[rank])[0]
            broken.append(
                f"rank {rank} waits at {action} for {what} of rank {who}, which waits too: put {what} earlier"
            )
    return broken


def _awaited(
    action: Action,
    spec: RankSpec | None,
    holders: dict[tuple[int, int], list[int]],
    done: list[set[Action]],
    owners: dict[int, list[int]],
    own: set[Action],
) -> list[tuple[int, Action]]:
    """Return what has to be done elsewhere before an action can be, and is not: ``(rank, action)``. ``own``: what its rank has done."""
    if spec is None:
        return []
    if spec.zero > 2 and action.kind in ("F", "B", "I", "R"):
        return [
            (rank, gather)
            for bucket, stages in spec.readers.items()
            if action.stage in stages
            for gather in takewhile(own.__contains__, (Action(n, "UNSHARD", bucket) for n in count()))
            for rank in owners.get(bucket, ())
            if gather not in done[rank]
        ]
    if spec.zero > 2 and action.kind == "RESHARD":  # it waits for what it lets go of
        gather = Action(action.stage, "UNSHARD", action.index)
        return [(rank, gather) for rank in owners.get(action.index or 0, ()) if gather not in done[rank]]
    if spec.zero > 1 and action.kind == "SCATTER" and action.index in spec.buckets:
        place = spec.buckets.index(action.index)
        over = spec.buckets[
            max(0, place - BUCKETS_UNDER_WAY) : max(0, place - BUCKETS_UNDER_WAY + 1)
        ]  # more have no room
        scatters = [(bucket, Action(0, "SCATTER", bucket)) for bucket in over]
        return [(r, scatter) for bucket, scatter in scatters for r in owners.get(bucket, ()) if scatter not in done[r]]
    if action.kind not in ("RECV_F", "RECV_B"):
        return []
    forward = action.kind == "RECV_F"
    if forward:
        others = spec.traffic.sources.get(action.stage, frozenset())
    else:
        others = frozenset(s for s, of in spec.traffic.returns.items() if action.stage in of)
    kind: ActionKind = "SEND_F" if forward else "SEND_B"
    wanted = [
        (rank, Action(other, kind, action.index)) for other in sorted(others) for rank in holders[spec.pipeline, other]
    ]
    return [(rank, sent) for rank, sent in wanted if sent not in done[rank]]


def _end(actions: Sequence[Action]) -> list[str]:
    """At most one CLIP, behind every reduction; one STEP, behind all but what gathers the new weights."""
    broken = []
    kinds = [action.kind for action in actions]
    if kinds.count("STEP") != 1:
        broken.append(f"updates {kinds.count('STEP')} times: a step has one STEP")
    end = actions[kinds.index("STEP") + 1 :] if "STEP" in kinds else ()
    broken += [f"runs {action} after STEP: only GATHER follows it" for action in end if action.kind != "GATHER"][:1]
    early = [action for action in actions[: len(actions) - len(end)] if action.kind == "GATHER"]
    broken += [f"runs {action} before STEP: there is nothing new to gather" for action in early]
    if kinds.count("CLIP") > 1:
        broken.append(f"clips {kinds.count('CLIP')} times: at most once a step")
    if "CLIP" in kinds:
        late = [action for action in actions[kinds.index("CLIP") :] if action.kind not in ("CLIP", "STEP", "GATHER")]
        broken += [f"clips before {action}: the norm is known only after every reduction" for action in late]
    return broken
