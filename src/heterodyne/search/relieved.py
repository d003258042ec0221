"""The loop that makes a bound plan fit: simulate it, give relief to the devices that lack memory, and simulate it again.

What lacks is known exactly only when a plan is simulated, since relief has traffic and buffers of its own. With it, plans in which hosts
keep the optimizer's state of devices that have no room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from heterodyne.cost.model import CostModel
from heterodyne.errors import PlanError
from heterodyne.plan.plan import Plan, Stage
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Candidate
from heterodyne.search.predict import overflow, predict, weighed, with_stages
from heterodyne.sim.run import Simulation

__all__ = ["Relieve", "offloading", "relieved"]

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


def offloading(
    model: CostModel, runs: Mapping[str, MicroBatchChoice], search: Callable[[CostModel], Iterable[Candidate]]
) -> Iterator[Candidate]:
    """What is found where hosts keep the state of all accelerators that lack room for it, if what an update there takes was measured; in
    each plan hosts then keep the state of those that need it.

    ``runs``: of the devices that can hold the model beside others. ``search``: all that is weighed, under another model of costs.
    """
    short = [
        device.id
        for device in model.cluster.devices
        if device.id not in runs and device.backend != "cpu" and model.measured(device.id).host_update_s_per_byte
    ]
    for candidate in search(replace(model, on_host=frozenset(short))) if short else ():
        if candidate.plan is None or {*short}.isdisjoint(candidate.plan.devices):
            continue
        try:
            made, played = relieved(
                model, candidate.plan, runs, lambda made, _, lacks: _hosted(made, {*short} & {*lacks})
            )
        except PlanError as error:
            yield replace(candidate, plan=None, simulation=None, why_not=str(error))
            continue
        away = {device for p in made.pipelines for stage in p.stages if stage.offload for device in stage.devices}
        named = ", ".join(device for device in short if device in away)
        name = f"{candidate.name}, with the optimizer's state of {named} on the host" if named else candidate.name
        yield replace(weighed(model, name, candidate.kind, made, played), left_out=candidate.left_out)


def _hosted(plan: Plan, devices: set[str]) -> Plan:
    """With the optimizer's state of these devices on their hosts."""

    def changed(_: int, stage: Stage) -> Stage:
        return stage.model_copy(update={"offload": stage.offload or not devices.isdisjoint(stage.devices)})

    return plan.model_copy(update={"pipelines": tuple(with_stages(p, changed) for p in plan.pipelines)})
