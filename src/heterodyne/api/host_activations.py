"""How much of the activations of each rank is in the memory of its host at a time, as its profile tells."""

from __future__ import annotations

from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from heterodyne.plan.program import Program
from heterodyne.sim.run import simulate

__all__ = ["host_activation_bytes"]


def host_activation_bytes(
    plan: Plan, program: Program, graph: ModelGraph, cluster: Cluster, profile: Profile
) -> tuple[int, ...]:
    """The most of each rank. Raises MeasureError for a profile that lacks what copies to the host take."""
    if not any(stage.offload_activations for pipeline in plan.pipelines for stage in pipeline.stages):
        return (0,) * len(cluster.devices)
    costs = CostModel(graph=graph, cluster=cluster, profile=profile, recipe=Recipe(precision=plan.precision))
    return simulate(program, costs.of(plan)).host_bytes
