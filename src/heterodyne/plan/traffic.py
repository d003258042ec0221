"""What the stages of a pipeline exchange with other places, and what each rank has to do because of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.cut import crossings
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.plan.weights import PlannedWeights

__all__ = ["MESSAGES_AHEAD", "RankSpec", "Traffic", "rank_specs"]

MESSAGES_AHEAD = 2
"""Messages from one rank for which the runtime makes room before they are waited for; memory counts as many, and as many sent."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one pipeline, by stage: the stages on other places that it reads from, and those of them that want gradients back.

    ``sources[s]``: stages whose activations stage s receives; ``returns[s]``: those of them that it sends gradients to.
    """

    sources: Mapping[int, frozenset[int]] = field(default_factory=dict)
    returns: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, pipeline: Pipeline, graph: ModelGraph) -> Traffic:
        if len(pipeline.stages) == 1:
            return cls()
        place = pipeline.place_of_stage
        sources: dict[int, set[int]] = {}
        returns: dict[int, set[int]] = {}
        for crossing in crossings(graph, [stage.ops[0] for stage in pipeline.stages]):
            for consumer in crossing.consumers:
                if place[consumer] != place[crossing.producer]:
                    sources.setdefault(consumer, set()).add(crossing.producer)
                    if crossing.differentiable:
                        returns.setdefault(consumer, set()).add(crossing.producer)
        return cls(
            sources={stage: frozenset(found) for stage, found in sources.items()},
            returns={stage: frozenset(found) for stage, found in returns.items()},
        )

    @property
    def receives(self) -> frozenset[int]:
        """The stages that receive activations."""
        return frozenset(self.sources)

    @property
    def sends(self) -> frozenset[int]:
        """The stages that send activations."""
        return frozenset[int]().union(*self.sources.values())

    @property
    def gives_back(self) -> frozenset[int]:
        """The stages that send gradients."""
        return frozenset(self.returns)

    @property
    def gets_back(self) -> frozenset[int]:
        """The stages that receive gradients."""
        return frozenset[int]().union(*self.returns.values())


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What one rank has to do in a step.

    Args:
        pipeline: its number.
        stages: those that it holds.
        micro_batches: how many each of them runs.
        traffic: of its pipeline.
        buckets: the gradient buckets that it reduces with others, in order.
        zero: the ZeRO level: what is sharded over the owners of each bucket; from 1 on each updates a range of it and gathers the others.
        readers: for each bucket, the stages of the rank that read any of its parameters.
        hosted: the stages that offload activations, with how many passes ahead of a backward they begin to come back; None: inside of it.
        kept: with sharded parameters, the stages that keep theirs unsharded between forward and backward.
    """

    pipeline: int = 0
    stages: tuple[int, ...] = (0,)
    micro_batches: int
    traffic: Traffic = field(default_factory=Traffic)
    buckets: tuple[int, ...] = ()
    zero: int = 0
    readers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    hosted: Mapping[int, int | None] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


def rank_specs(plan: Plan, graph: ModelGraph, cluster: Cluster, weights: PlannedWeights) -> tuple[RankSpec | None, ...]:
    """For each rank what it has to do; None for an idle one."""
    found: list[RankSpec | None] = [None] * len(cluster.devices)
    reduced = [bucket for bucket in weights.buckets if len(bucket.owners) > 1]
    for number, pipeline in enumerate(plan.pipelines):
        traffic, places, reads = Traffic.of(pipeline, graph), pipeline.place_of_stage, weights.reads[number]
        for place, devices in enumerate(pipeline.places):
            for device in devices:
                stages = tuple(stage for stage, of in enumerate(places) if of == place)
                own = [bucket for bucket in reduced if device in bucket.owners]
                found[cluster.rank(device)] = RankSpec(
                    pipeline=number,
                    stages=stages,
                    micro_batches=len(pipeline.micro_batches),
                    traffic=traffic,
                    buckets=tuple(bucket.index for bucket in own),
                    zero=plan.zero,
                    readers={b.index: tuple(s for s in stages if not reads[s].isdisjoint(b.parameters)) for b in own},
                    hosted={
                        s: pipeline.stages[s].reload_ahead for s in stages if pipeline.stages[s].offload_activations
                    },
                    kept=frozenset(s for s in stages if not pipeline.stages[s].reshard_after_forward),
                )
    return tuple(found)
