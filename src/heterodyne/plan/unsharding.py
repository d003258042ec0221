"""When parameters are gathered, and let go of, where the devices that hold the same weights share them out (ZeRO-3).

They are needed from the first to the last forward of a stage, and from the first to the last of its backwards. Where the rank runs other
stages between (breadth first, as GPipe does with several stages a place), they are let go of meanwhile, unless the stage is to keep them
(FSDP2's ``reshard_after_forward``). So a step gathers each bucket at most twice, however many micro-batches it has ("layered gradient
accumulation", Lamy-Poirier, "Breadth-first pipeline parallelism", MLSys 2023), and pipelines that share a bucket need not have equally
many. Each gather is started one stage ahead, so that it is behind the passes of that. The gradients of a bucket are reduced right
behind the last backward that makes any of them: then there are never more than those of two stages.

A gather is an exchange between all owners of a bucket, so all of them do as many, in one order. Ranks that would gather a bucket more
often than others keep it in between. Pipelines that are cut in different ways may still come to their stages in orders that do not agree;
then everything is gathered when the step begins (``ahead``), which always does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from heterodyne.errors import PlanError
from heterodyne.plan.program import Action, Program
from heterodyne.plan.verify import collective_order

__all__ = ["RankPasses", "with_unsharding"]

_Span = tuple[int, int]
"""Actions ``[first, last]`` of a list, during which a bucket is there."""


@dataclass(frozen=True, kw_only=True)
class RankPasses:
    """Of one rank.

    Args:
        actions: its passes, with what they receive and send; none, for a pipeline without a sample.
        readers: of each bucket that it shares, in the order of the reductions, the stages of the rank that read it.
        kept: the stages whose parameters stay between their forwards and their backwards.
    """

    actions: Sequence[Action]
    readers: Mapping[int, Sequence[int]]
    kept: Collection[int] = field(default_factory=frozenset)


def with_unsharding(ranks: Sequence[RankPasses | None], *, ahead: bool = False) -> tuple[tuple[Action, ...], ...]:
    """The passes of all ranks (None: an idle one), with what gathers parameters, lets go of them and reduces gradients.

    ``ahead``: everything is gathered before the first pass. So it is too where orders do not agree otherwise.
    """
    spans = [{} if rank is None else _spans(rank) for rank in ranks]
    often: dict[int, set[int]] = {}
    for rank, own in zip(ranks, spans, strict=True):
        for bucket in rank.readers if rank is not None and rank.actions else ():
            often.setdefault(bucket, set()).add(len(own[bucket]))
    made: list[tuple[Action, ...]] = []
    for rank, own in zip(ranks, spans, strict=True):
        agreed = {
            bucket: of if len(often[bucket]) == 1 and not ahead else _one(of, ahead) for bucket, of in own.items()
        }
        agreed = {bucket: of for bucket, of in agreed.items() if max(often[bucket])}  # else nobody reads it
        made.append(() if rank is None else _placed(rank, agreed) if rank.actions else _reductions(rank))
    try:
        order = [action for action, _ in collective_order(Program(ranks=tuple(made)))]
        if ahead:  # of two that any order would do for, a rank without passes starts first what all others begin with
            order.sort(key=lambda action: action.kind == "SCATTER")
    except PlanError:
        if ahead:
            raise
        return with_unsharding(ranks, ahead=True)
    return tuple(
        own if rank is None or rank.actions else _bystander(order, rank.readers)
        for rank, own in zip(ranks, made, strict=True)
    )


def _one(spans: Sequence[_Span], ahead: bool) -> list[_Span]:
    """The bucket stays from the first use to the last; where there is none, it comes and goes."""
    return [(0 if ahead or not spans else spans[0][0], spans[-1][1] if spans else 0)]


def _bystander(order: Sequence[Action], readers: Mapping[int, Sequence[int]]) -> tuple[Action, ...]:
    """The part in them of a rank without passes: what it must start for the other owners."""
    own: list[Action] = []
    for action in order:
        if action.index in readers and action.kind in ("UNSHARD", "SCATTER"):
            own.append(action)
            own += [Action(action.stage, "RESHARD", action.index)] if action.kind == "UNSHARD" else []
    return tuple(own)


def _reductions(rank: RankPasses) -> tuple[Action, ...]:
    """A rank without passes starts its reductions in the order of the buckets, as every other rank does."""
    return tuple(Action(0, "SCATTER", bucket) for bucket in sorted(rank.readers))


def _placed(rank: RankPasses, spans: Mapping[int, Sequence[_Span]]) -> tuple[Action, ...]:
    """Buckets are numbered in the order of the backward, so what is gathered together comes in that order or, at first, the other way."""
    actions = rank.actions
    before: dict[int, list[Action]] = {}
    behind: dict[int, list[Action]] = {}
    for bucket, of in sorted(spans.items()):
        for number, (first, last) in enumerate(of):
            at = before.setdefault(first, [])
            at.insert(len(at) if number else 0, Action(number, "UNSHARD", bucket))
            behind.setdefault(last, []).append(Action(number, "RESHARD", bucket))
    ends = {action.stage: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
    complete = 0
    for bucket, stages in rank.readers.items() if actions else ():
        complete = max(complete, *(ends[stage] for stage in stages)) if stages else len(actions) - 1
        behind.setdefault(complete, []).append(Action(0, "SCATTER", bucket))
    return tuple(
        each
        for place, action in enumerate(actions)
        for each in (*before.get(place, ()), action, *behind.get(place, ()))
    )


def _spans(rank: RankPasses) -> dict[int, list[_Span]]:
    """Return, for each bucket, when its rank would have it there. Times without a pass between them are one."""
    if not rank.actions:
        return {}
    of_stage: dict[int, list[_Span]] = {}
    earlier: _Span | None = None
    for stage, (first, last) in sorted(_uses(rank.actions, rank.kept), key=lambda use: use[1]):
        own = of_stage.setdefault(stage, [])
        own.append((max(earlier[0] if earlier is not None else 0, own[-1][1] + 1 if own else 0), last))
        earlier = first, last
    found: dict[int, list[_Span]] = {}
    for bucket, stages in rank.readers.items():
        own = found.setdefault(bucket, [])
        for first, last in sorted(span for stage in stages for span in of_stage[stage]):
            if own and first <= own[-1][1] + 1:
                own[-1] = own[-1][0], max(last, own[-1][1])
            else:
                own.append((first, last))
    return found


def _uses(actions: Sequence[Action], kept: Collection[int]) -> list[tuple[int, _Span]]:
    """For each stage when its passes need its parameters."""
    found = []
    for stage in dict.fromkeys(action.stage for action in actions):
        forwards = [place for place, action in enumerate(actions) if action.stage == stage and action.kind == "F"]
        backwards = [place for place, a in enumerate(actions) if a.stage == stage and a.kind in ("B", "I", "W", "R")]
        first, last = min(forwards), max(backwards)
        turn, again = max(forwards), min(backwards)
        others = any(action.stage != stage for action in actions[turn:again])
        if turn < again and others and stage not in kept:
            found += [(stage, (first, turn)), (stage, (again, last))]
        else:
            found.append((stage, (first, last)))
    return found
