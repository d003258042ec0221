"""What a rank is asked to do: a model, a plan for it on a cluster, and its place among the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from heterodyne.plan.program import Program
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.placement import Placement, RankRole

__all__ = ["Assignment"]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The parts of a rank's runtime are made from it. ``program``: that of the plan, lowered; ``communicator``: of this rank."""

    graph: ModelGraph
    plan: Plan
    program: Program
    cluster: Cluster
    communicator: Communicator

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @cached_property
    def placement(self) -> Placement:
        return Placement.of(self.plan, self.cluster)

    @property
    def role(self) -> RankRole:
        return self.placement.places[self.rank]
