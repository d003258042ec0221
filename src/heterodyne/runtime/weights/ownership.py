"""Which rank holds which parameters and buffers, as the plan has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.buckets import owners_of
from heterodyne.plan.plan import Plan

__all__ = ["Ownership"]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """``owners``: for each parameter and buffer (canonical names) the ranks that hold it, those with samples first.

    What no op reads is held by every rank of the plan. Where each of these holds the whole model, an idle rank holds a copy too,
    which is brought up to date when the state is asked for.
    """

    owners: Mapping[str, tuple[int, ...]]
    active: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, graph: ModelGraph, cluster: Cluster) -> Ownership:
        working = {d for p in plan.pipelines if p.micro_batches.samples for stage in p.stages for d in stage.devices}
        return cls(
            owners={
                name: tuple(sorted(map(cluster.rank, devices), key=lambda r: (cluster.devices[r].id not in working, r)))
                for name, devices in owners_of(plan, graph).items()
            },
            active=tuple(sorted(map(cluster.rank, plan.devices))),
        )

    @cached_property
    def whole(self) -> bool:
        """Every rank of the plan holds everything."""
        return all(len(ranks) == len(self.active) for ranks in self.owners.values())

    def holds(self, rank: int, name: str) -> bool:
        return self.whole or rank in self.owners[name]

    def keeper(self, name: str) -> int:
        """The rank whose value counts."""
        return self.owners[name][0]
