"""Whether the hosts of a cluster have memory for what a plan offloads: optimizer state and activations."""

from __future__ import annotations

from dataclasses import dataclass

from heterodyne.cost.model import CostModel
from heterodyne.graph.ir import dtype_bytes
from heterodyne.plan.optimizer_state import host_values
from heterodyne.plan.plan import Plan
from heterodyne.plan.weights import PlannedWeights
from heterodyne.sim.run import Simulation
from heterodyne.units import format_bytes

__all__ = ["HostBytes", "kept_on_hosts", "lacking_on_hosts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBytes:
    """Bytes on one host: ``state`` of the optimizer with weights and gradients beside it in fp32, ``activations`` at most at a time."""

    state: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.state + self.activations


def kept_on_hosts(model: CostModel, made: Plan, simulation: Simulation) -> dict[str, HostBytes]:
    """For each node what a plan keeps in its memory; nodes where it keeps nothing are left out."""
    weights = None
    found: dict[str, HostBytes] = {}
    for device in made.devices:
        stages = [stage for p in made.pipelines for stage in p.stages if device in stage.devices]
        activations = simulation.host_bytes[model.cluster.rank(device)]
        state = 0
        if any(stage.offload for stage in stages):
            weights = weights or PlannedWeights.of(made, model.graph)
            memory, ops = model.device_memory[device], [stage.ops for stage in stages]
            recipe, held = model.recipe, [p for p in memory.held(ops, weights.boxes[device]) if p.trainable]
            whole = sum(
                max(4, dtype_bytes(p.dtype)) * host_values(recipe.optimizer, recipe.momentum, p.shape) for p in held
            )
            state = round(weights.state_parts.get(device, 1.0) * whole)
        if state or activations:
            node = model.cluster.device(device).node
            before = found.get(node, HostBytes())
            found[node] = HostBytes(state=before.state + state, activations=before.activations + activations)
    return found


def lacking_on_hosts(model: CostModel, made: Plan, simulation: Simulation) -> str:
    """Which hosts lack room for it, by how much and what would help, as a sentence; "" if none is known to."""
    hosts = model.cluster.hosts
    told = []
    for node, kept in kept_on_hosts(model, made, simulation).items() if hosts else ():
        if node in hosts and kept.total > hosts[node]:
            what = {"optimizer state": kept.state, "activations": kept.activations}
            parts = " and ".join(f"{name} ({format_bytes(size)})" for name, size in what.items() if size)
            fields = {"'offload'": kept.state, "'offload_activations'": kept.activations}
            helps = " or ".join(name for name, size in fields.items() if size)
            told.append(
                f"it keeps {parts} in the memory of host {node}, which has {format_bytes(hosts[node])}: "
                f"{format_bytes(kept.total - hosts[node])} too little; leave {helps} out of stages there, let more devices share the state "
                "('zero'), or, if the host has more, say so with 'host_memory' in the cluster file"
            )
    return "; ".join(told)
