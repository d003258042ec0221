"""Plans in which hosts keep the optimizer's state of devices that have no room for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from heterodyne.cost.model import CostModel
from heterodyne.errors import PlanError
from heterodyne.plan.plan import Plan, Stage
from heterodyne.search.host_room import lacking_on_hosts
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Candidate
from heterodyne.search.predict import overflow, predict, with_stages

__all__ = ["offloading", "short_of_memory"]


def short_of_memory(model: CostModel, runs: Collection[str]) -> tuple[str, ...]:
    """The accelerators that cannot hold the model beside others, if what an update on their hosts takes was measured. ``runs``: who can."""
    return tuple(
        device.id
        for device in model.cluster.devices
        if device.id not in runs and device.backend != "cpu" and model.measured(device.id).host_update_s_per_byte
    )


def offloading(
    model: CostModel,
    short: Collection[str],
    runs: Mapping[str, MicroBatchChoice],
    search: Callable[[CostModel], Iterable[Candidate]],
) -> Iterator[Candidate]:
    """What is found where the hosts of these devices keep the state; each with the devices that need it, judged by ``model``.

    ``search``: all that is weighed, under what another model of costs says.
    """
    for candidate in search(replace(model, on_host=frozenset(short))):
        used = [] if candidate.plan is None else [device for device in short if device in candidate.plan.devices]
        if candidate.plan is None or not used:
            continue
        named = replace(
            candidate, name=f"{candidate.name}, with the optimizer's state of {', '.join(used)} on the host"
        )
        try:
            made, simulation = predict(model, _marked(candidate.plan, used), runs)
        except PlanError as error:
            yield replace(named, plan=None, simulation=None, why_not=str(error))
            continue
        if lacking := lacking_on_hosts(model, made, simulation):
            yield replace(named, plan=None, simulation=None, why_not=lacking, short_of_host=True)
        elif not overflow(model, made, simulation):
            yield replace(named, plan=made, simulation=simulation)


def _marked(plan: Plan, devices: Collection[str]) -> Plan:
    def changed(_: int, stage: Stage) -> Stage:
        return stage.model_copy(update={"offload": not set(devices).isdisjoint(stage.devices)})

    return plan.model_copy(
        update={"predicted": None, "pipelines": tuple(with_stages(p, changed) for p in plan.pipelines)}
    )
