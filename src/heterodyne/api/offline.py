"""Plans and timelines of what is known already: no device is asked, and torch is not loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from heterodyne.arguments import checked_arguments, described
from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import HeterodyneError, InfeasibleError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection, Strategy
from heterodyne.plan.bind import bind
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.check import require_valid
from heterodyne.plan.lower import lower
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import Precisions, precision_of
from heterodyne.report.simulated import lacking
from heterodyne.search.planner import plan as search_plan
from heterodyne.sim.run import Simulation, simulate
from heterodyne.timeline import Timeline

__all__ = ["find_plan", "measured_precision", "played", "require_fitting", "simulate_plan"]


@checked_arguments
def find_plan(
    graph: ModelGraph,
    cluster: Cluster,
    profile: Profile,
    *,
    global_batch_size: int,
    strategy: Strategy = "auto",
    micro_batch_sizes: Sequence[int] | Literal["auto"] = "auto",
    optimizer: OptimizerSection | None = None,
) -> Plan:
    """Return the fastest plan by prediction for a model on measured devices, or the fastest of one kind of plan.

    Args:
        graph, profile: of `capture` and `measure_model`; the precision is that of the profile.
        strategy: the name of one, as in ``plan=`` of `distribute`.
        micro_batch_sizes: ``auto``: those that were measured.
        optimizer: what its state takes; None: an AdamW.

    Raises InfeasibleError if no plan fits, with what each device lacks, or MeasureError if the profile is of other devices.
    """
    section = _section(optimizer)
    return search_plan(
        graph,
        cluster,
        profile,
        global_batch_size=global_batch_size,
        micro_batch_sizes=None if micro_batch_sizes == "auto" else micro_batch_sizes,
        optimizer=section.name,
        momentum=section.momentum,
        precision=measured_precision(cluster, profile),
        bucket_bytes=None,
        strategy=strategy,
        able=Capabilities(graph, section.reach),
    ).plan


@checked_arguments
def simulate_plan(
    plan: Plan | Path | str,
    graph: ModelGraph,
    cluster: Cluster,
    profile: Profile,
    *,
    optimizer: OptimizerSection | None = None,
) -> Timeline:
    """Return the timeline of a step under a plan, or under that in a file, as it is predicted.

    Raises PlanError for a plan that cannot run, InfeasibleError where a device lacks memory, MeasureError if the profile is of other
    devices or in another precision.
    """
    bound = bind(plan if isinstance(plan, Plan) else Plan.load(plan), graph, cluster)
    require_valid(bound, graph, cluster)
    profile.require({device.id: precision_of(bound.precision, device.kind) for device in cluster.devices})
    simulation, _ = played(bound, graph, cluster, profile, _section(optimizer))
    require_fitting(simulation, bound, cluster)
    return simulation.timeline([device.id for device in cluster.devices])


def played(
    plan: Plan, graph: ModelGraph, cluster: Cluster, profile: Profile, optimizer: OptimizerSection
) -> tuple[Simulation, float]:
    """Return what a step of a plan does, and the seconds that no plan of these devices is faster than."""
    recipe = Recipe(
        optimizer=optimizer.name, momentum=optimizer.momentum, precision=plan.precision, bucket_bytes=plan.bucket_bytes
    )
    lowered = lower(plan, graph, cluster)
    costs = CostModel(graph=graph, cluster=cluster, profile=profile, recipe=recipe).of(plan, lowered.weights)
    return simulate(lowered.program, costs, steady=lowered.steady), costs.lower_bound_s


def require_fitting(simulation: Simulation, plan: Plan, cluster: Cluster) -> None:
    """Raise InfeasibleError if a device lacks memory for its part of a plan."""
    short = lacking(simulation, plan, cluster)
    if short:
        raise InfeasibleError(
            "the plan does not fit:\n  - "
            + "\n  - ".join(short)
            + "\nTake smaller micro-batches or a schedule that holds fewer of "
            "them, recompute blocks of the stage, or give it fewer ops"
        )


def _section(optimizer: OptimizerSection | None) -> OptimizerSection:
    """Raises HeterodyneError for an optimizer that is not known by its options."""
    if optimizer is not None and not isinstance(optimizer, OptimizerSection):
        raise HeterodyneError(
            f"optimizer is {described(optimizer)}: here it is OptimizerSection(name='adamw', ...), by which its state is known"
        )
    return optimizer or OptimizerSection()


def measured_precision(cluster: Cluster, profile: Profile) -> Precisions:
    """Return the precision in which each kind of device was measured. Raises MeasureError if any was not."""
    profile.require({d.id: profile.devices[d.id].precision if d.id in profile.devices else "" for d in cluster.devices})
    found = {device.kind: profile.devices[device.id].precision for device in cluster.devices}
    return found if len(set(found.values())) > 1 else next(iter(found.values()))
