"""What a run has learned of the memory of its devices, as the cluster that its next plan is made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterodyne.cluster.spec import Cluster, Device
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.errors import InfeasibleError
from heterodyne.runtime.records.shortages import Shortage

__all__ = ["as_learned", "infeasible", "longest_step"]


def as_learned(cluster: Cluster, shortages: Sequence[Shortage]) -> Cluster:
    """The cluster, in which no device has more memory than it was seen to have when its memory ended."""
    least: dict[str, int] = {}
    for shortage in shortages:
        device = next((d for d in cluster.devices if d.id == shortage.device), None)
        if device is not None:
            least[device.id] = min(least.get(device.id, device.memory_bytes), _planned_with(device, shortage))
    return replace(
        cluster,
        devices=tuple(replace(d, memory_bytes=least[d.id]) if d.id in least else d for d in cluster.devices),
    )


def _planned_with(device: Device, shortage: Shortage) -> int:
    """Return what may be planned with of the device: what it was seen to have, in the measure of the prediction.

    The plan that failed had a predicted peak of P bytes and needed N > P, where U were usable. The prediction was too low by N / P, so the
    next plan may have a predicted peak of U P / N at most. As U < N, that is less than P: the plan that failed does not fit any more. If
    longer samples were the cause, the next plan is predicted for these, and U is the bound.
    """
    # An accelerator's allocator does not see what the framework occupies there, which plans count; a CPU worker's size is all of it.
    context = 0 if device.backend == "cpu" else MemoryAssumptions().context(device.backend)
    predicted, needed, usable = (
        max(0, shortage.predicted_bytes - context),
        shortage.needed_bytes,
        shortage.usable_bytes,
    )
    if shortage.predicted_bytes and predicted < needed and not shortage.longer:
        usable = usable * predicted // needed
    return context + usable


def longest_step(shortages: Sequence[Shortage]) -> int | None:
    """The step of which the batch is the example of the next plan, because its samples were longer than those of the last one."""
    return max((s.step for s in shortages if s.longer and s.step is not None), default=None)


def infeasible(error: InfeasibleError, shortages: Sequence[Shortage]) -> InfeasibleError:
    """The same error, which says since when no plan fits."""
    latest = {shortage.device: shortage for shortage in shortages}
    seen = "".join(f"\n  - {shortage}" for shortage in latest.values())
    told = InfeasibleError(
        f"the run has run out of memory, and no plan is left that asks for less:{seen}\n{error}\nOr free the memory that others hold "
        "there, remove out-of-memory.jsonl from the run directory, and resume",
        shortfalls=error.shortfalls,
    )
    told.shared = error.shared
    return told
