"""How much of the activations of each rank is in the memory of its host at a time, as its profile tells."""

from __future__ import annotations

from heterodyne.cluster.profile import Profile
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.plan.lower import Lowered
from heterodyne.sim.run import simulate

__all__ = ["host_activation_bytes"]


def host_activation_bytes(lowered: Lowered, profile: Profile) -> tuple[int, ...]:
    """The most of each rank. Raises MeasureError for a profile that lacks what copies to the host take."""
    plan, cluster = lowered.plan, lowered.cluster
    if not any(stage.offload_activations for pipeline in plan.pipelines for stage in pipeline.stages):
        return (0,) * len(cluster.devices)
    costs = CostModel(graph=lowered.graph, cluster=cluster, profile=profile, recipe=Recipe(precision=plan.precision))
    return simulate(lowered.program, costs.of(plan, lowered.weights)).host_bytes
