"""A plan becomes a program: what each rank does in one optimizer step, in order.

A schedule says what the devices of each place compute, and in which order. Lowering adds what follows from it: before a stage
runs it receives what other places send, behind it it sends what others read; forward activations, backward gradients. Activations that
wait on the host leave and come back between the passes (see `with_offload`). Then the
gradient buckets, in the order in which the backward completes them, each between the devices that own its parameters; where these shard
its state, each sums and updates its own range, and the new weights are gathered in the order in which the forward reads them; or, where
parameters are sharded too, before the passes that read them (see `heterodyne.plan.unsharding`).
A pipeline without a share runs no micro-batch, but takes part in every reduction and makes the same update as the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.check import require_valid
from heterodyne.plan.order import is_asynchronous, orders_of
from heterodyne.plan.placement import Placement
from heterodyne.plan.plan import Plan
from heterodyne.plan.program import Action, Program
from heterodyne.plan.realign import realigned
from heterodyne.plan.schedules.asynchronous import steady
from heterodyne.plan.traffic import RankSpec, Traffic, rank_specs
from heterodyne.plan.unsharding import RankPasses, with_unsharding
from heterodyne.plan.verify import require_runnable
from heterodyne.plan.weights import PlannedWeights

__all__ = ["Lowered", "lower", "lower_again", "with_offload"]


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A plan for a model on a cluster, with all that follows from the three.

    Args:
        able: what runs exactly for the model.
        program: what each rank does in a step; where the schedule is asynchronous, in one that no other follows.
        specs: what each rank has to do in it; None for an idle one.
        weights: which devices hold, reduce and update which weights.
        placement: where each rank stands.
        clip: whether the program clips gradients.
    """

    plan: Plan
    cluster: Cluster
    able: Capabilities
    program: Program
    specs: tuple[RankSpec | None, ...]
    weights: PlannedWeights
    placement: Placement
    clip: bool

    @property
    def graph(self) -> ModelGraph:
        return self.able.graph

    @property
    def steady(self) -> Program | None:
        """Return what each rank does from one step to the next, where the schedule is asynchronous; None where steps are flushed."""
        return Program(ranks=tuple(map(steady, self.program.ranks))) if is_asynchronous(self.plan) else None


def lower(
    plan: Plan, graph: ModelGraph, cluster: Cluster, *, clip: bool = True, able: Capabilities | None = None
) -> Lowered:
    """Lower a plan. Raises PlanError with every rule that it breaks.

    ``clip`` adds gradient clipping, which asynchronous schedules have none of. ``able``: what runs exactly; None: what does for the model,
    whatever its optimizer.
    """
    able = able or Capabilities(graph)
    weights = require_valid(plan, graph, cluster, able)
    clip = clip and not is_asynchronous(plan)  # when one rank updates, others have no gradients yet
    return _lowered(plan, cluster, able, rank_specs(plan, graph, cluster, weights), weights, clip)


def lower_again(first: Lowered, graph: ModelGraph, replaced: Collection[str]) -> Lowered:
    """Return what a plan lowers to for another capture of the model. Its weights stay where they are, and so do its buckets.

    ``replaced``: buffers that were put in the place of others. Raises PlanError if the plan cannot follow.
    """
    plan, cluster = realigned(first.plan, first.weights, first.graph, graph, replaced), first.cluster
    able = replace(first.able, graph=graph)
    require_valid(plan, graph, cluster, able)
    # Where gradients flow now and did not before, or the other way round, ranks have other messages.
    traffic = [Traffic.of(pipeline, graph) for pipeline in plan.pipelines]
    specs = tuple(spec and replace(spec, traffic=traffic[spec.pipeline]) for spec in first.specs)
    return _lowered(plan, cluster, able, specs, first.weights, first.clip)


def _lowered(
    plan: Plan,
    cluster: Cluster,
    able: Capabilities,
    specs: tuple[RankSpec | None, ...],
    weights: PlannedWeights,
    clip: bool,
) -> Lowered:
    passes = _passes(plan, cluster, specs)
    program = _program(passes, specs, clip=clip)
    try:
        require_runnable(program, specs)
    except PlanError:
        if plan.zero < 3:
            raise
        # Gathers may make ranks wait for each other that wait for messages too. Not if they come first.
        program = _program(passes, specs, clip=clip, ahead=True)
        require_runnable(program, specs)
    return Lowered(
        plan=plan,
        cluster=cluster,
        able=able,
        program=program,
        specs=specs,
        weights=weights,
        placement=Placement.of(plan, cluster),
        clip=clip,
    )


def _passes(plan: Plan, cluster: Cluster, specs: Sequence[RankSpec | None]) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank computes, receives and sends."""
    ranks: list[tuple[Action, ...]] = [()] * len(cluster.devices)
    for pipeline in plan.pipelines:
        for devices, order in zip(pipeline.places, orders_of(plan.schedule, pipeline), strict=True):
            for rank in map(cluster.rank, devices):
                spec = specs[rank]
                assert spec is not None  # it is in a pipeline
                ranks[rank] = tuple(_with_traffic(with_offload(order, spec.hosted), spec.traffic))
    return tuple(ranks)


def _program(
    passes: Sequence[Sequence[Action]], specs: Sequence[RankSpec | None], *, clip: bool, ahead: bool = False
) -> Program:
    """With parameters that are gathered, and the update; ``ahead``: all are gathered before the first pass."""
    whole = passes
    if any(spec is not None and spec.zero > 2 for spec in specs):
        whole = with_unsharding(
            [
                None if spec is None else RankPasses(actions=own, readers=spec.readers, kept=spec.kept)
                for own, spec in zip(passes, specs, strict=True)
            ],
            ahead=ahead,
        )
    ends = (() if spec is None else _update(spec.buckets, clip=clip, zero=spec.zero) for spec in specs)
    return Program(ranks=tuple((*own, *end) for own, end in zip(whole, ends, strict=True)))


def _update(buckets: Iterable[int], *, clip: bool, zero: int) -> Iterator[Action]:
    """The end of a step: gradients are summed, weights updated."""
    for index in buckets if zero < 3 else ():
        yield Action(0, "SCATTER" if zero else "REDUCE_GRAD", index)
    if clip:
        yield Action(0, "CLIP")
    yield Action(0, "STEP")
    if zero in (1, 2):
        # What the next forward reads first comes first.
        yield from (Action(0, "GATHER", index) for index in reversed(tuple(buckets)))


def _with_traffic(order: Iterable[Action], traffic: Traffic) -> Iterator[Action]:
    """Yield what has to come before and what can leave behind each action."""
    for action in order:
        stage, index = action.stage, action.index
        if action.kind == "F" and stage in traffic.receives:
            yield Action(stage, "RECV_F", index)
        if action.kind in ("B", "I") and stage in traffic.gets_back:
            yield Action(stage, "RECV_B", index)
        yield action
        if action.kind == "F" and stage in traffic.sends:
            yield Action(stage, "SEND_F", index)
        if action.kind in ("B", "I") and stage in traffic.gives_back:
            yield Action(stage, "SEND_B", index)


# When activations that wait in the memory of the host have left the device, and when they begin to come back.
#
# They begin to leave inside of the forward, block by block. What is still on its way behind it has the next pass of the rank to leave in;
# unless that is its own backward, which takes what is still there as it is. Of what comes back a backward asks for one block ahead of the
# other, which needs least room; or all of a micro-batch begins to come so many passes before it, or where it would wait for its gradients.
def with_offload(order: Sequence[Action], hosted: Mapping[int, int | None]) -> Iterator[Action]:
    """The passes of a place with OFFLOAD and RELOAD. ``hosted``: of each stage that keeps something on the host, how many passes ahead of
    its backwards it begins to come back; None: inside of them."""
    forward = {(a.stage, a.index): at for at, a in enumerate(order) if a.kind == "F" and a.stage in hosted}
    before: dict[int, list[Action]] = {}
    behind: dict[int, list[Action]] = {}
    for at, action in enumerate(order):
        of = action.stage, action.index
        if action.kind not in ("B", "I") or of not in forward or at <= forward[of] + 1:
            continue
        left = forward[of] + 1
        behind.setdefault(left, []).append(Action(action.stage, "OFFLOAD", action.index))
        ahead = hosted[action.stage]
        if ahead is not None:
            before.setdefault(max(left + 1, at - ahead), []).append(Action(action.stage, "RELOAD", action.index))
    for at, action in enumerate(order):
        yield from before.get(at, ())
        yield action
        yield from behind.get(at, ())
