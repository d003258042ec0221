"""The loop that makes a bound plan fit: simulate it, give relief to the devices that lack memory, and simulate it again.

What lacks is known exactly only when a plan is simulated, since relief has traffic and buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from heterodyne.cost.model import CostModel
from heterodyne.plan.plan import Plan
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.predict import overflow, predict
from heterodyne.sim.run import Simulation

__all__ = ["Relieve", "relieved"]

Relieve: TypeAlias = Callable[[Plan, Simulation, Mapping[str, int]], Plan | None]
"""A leaner plan, or None if there is none, from a plan, how it was simulated, and the bytes that each device has lacked so far in all."""

_MOST = 4
"""Rounds: what lacks is added up, so a plan that can fit mostly does after one or two; each simulates the plan."""


def relieved(
    model: CostModel, plan: Plan, runs: Mapping[str, MicroBatchChoice], relieve: Relieve
) -> tuple[Plan, Simulation]:
    """The plan with so much relief that it fits; as it was last, and how that was simulated, where no relief is enough.

    Raises PlanError for a plan that cannot run.
    """
    made, played = predict(model, plan, runs)
    lacked: dict[str, int] = {}
    for _ in range(_MOST):
        over = overflow(model, made, played)
        if not over:
            break
        lacked = {device: lacked.get(device, 0) + over.get(device, 0) for device in {**lacked, **over}}
        leaner = relieve(made, played, lacked)
        if leaner is None or leaner.pipelines == made.pipelines:
            break  # whatever else goes frees nothing
        made, played = predict(model, leaner, runs)
    return made, played
