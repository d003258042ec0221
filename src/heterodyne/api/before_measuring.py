"""What is settled before anything is measured: whether the devices could hold the model at all, and how long measuring pays."""

from __future__ import annotations

from typing import Literal

from heterodyne.cluster.spec import Cluster
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import InfeasibleError
from heterodyne.job import OptimizerSection, ParallelismSection
from heterodyne.plan.capabilities import Capabilities
from heterodyne.units import counted, format_bytes, format_count

__all__ = ["measuring_s", "require_room"]

_MOST_S = 60.0
"""By default."""
_ALONE = 1 / 3
"""Of the time for measuring. One device has no shares to balance: what is measured chooses its micro-batch and predicts the step."""


def measuring_s(devices: int, asked_s: float | Literal["auto"]) -> float:
    """Seconds that measuring may take, of the most that a job allows."""
    most_s = _MOST_S if asked_s == "auto" else asked_s
    return most_s if devices > 1 else _ALONE * most_s


def require_room(
    able: Capabilities, cluster: Cluster, *, optimizer: OptimizerSection, parallelism: ParallelismSection
) -> None:
    """Raises InfeasibleError if weights, gradients and optimizer alone are more than the memory of the devices, in whatever parts."""
    graph = able.graph
    trained = [p for p in graph.parameters if p.trainable]
    states = Recipe(optimizer=optimizer.name, momentum=optimizer.momentum).states
    weights = sum(p.bytes for p in graph.parameters)
    gradients = sum(p.bytes for p in trained)
    needed = weights + gradients + round(gradients * states)
    rooms = {device.id: device.memory_bytes for device in cluster.devices}
    whole = not able.cuts(parallelism.strategy)
    room = max(rooms.values()) if whole else sum(rooms.values())
    # The host of an accelerator can keep the optimizer's state.
    if needed <= room or (weights + gradients <= room and any(device.backend != "cpu" for device in cluster.devices)):
        return
    # Whole models beside each other can share out the optimizer's state.
    beside = sum(max(0, memory - weights - gradients) for memory in rooms.values())
    if parallelism.strategy != "fastest" and 0 < gradients * states <= beside:
        return
    count = counted(len(rooms), "device")
    there = (
        f"the largest of {count} has {format_bytes(room)}" if whole else f"{count} here: {format_bytes(room)} together"
    )
    raise InfeasibleError(
        f"{graph.name} with {format_count(graph.parameter_count)} parameters cannot be trained here, so nothing is measured: it takes "
        f"{format_bytes(needed)} before the first activation (weights {format_bytes(weights)}, gradients {format_bytes(gradients)}, "
        f"{optimizer.name} {format_bytes(states * gradients)}), and there is not so much memory ({there}).\n"
        "To plan for devices that are not here, describe them: 'heterodyne plan JOB.yaml --cluster fleet.yaml --on-paper'; to train "
        "here, take a smaller model or add devices",
        shortfalls={name: needed - memory for name, memory in rooms.items() if memory < needed},
    )
