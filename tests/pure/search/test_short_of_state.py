"""Who lacks the memory for the optimizer's state trains beside who has it: with less of the state, or with a host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cost.model import CostModel
from heterodyne.search.planner import plan
from pure.build import cluster, graph, linear, profile


@pytest.mark.parametrize("lacks", [0.05, 0.3, 0.7, 0.95])
def test_a_device_that_lacks_any_part_of_its_state_trains_beside_one_with_room(lacks: float) -> None:
    """Whether it could hold the model by itself or not: it keeps less of the state, or its host keeps it."""
    model = graph(8, width=1024, saved=4 * 1024 * 4)
    roomy = cluster(2, named="gpu")
    machines = replace(roomy, devices=tuple(replace(device, backend="cuda") for device in roomy.devices))
    found = profile(model, machines, [linear(0.05)] * 2)
    hosts = {"host_update_s_per_byte": 4e-10, "host_copy_s_per_byte": 6e-11}
    measured = replace(found, devices={name: replace(own, **hosts) for name, own in found.devices.items()})
    whole = CostModel(graph=model, cluster=machines, profile=measured).memory_use(machines.devices[1].id, 1)
    short = replace(machines.devices[1], memory_bytes=round(whole.total - lacks * whole.optimizer))
    machines = replace(machines, devices=(machines.devices[0], short))
    planned = plan(model, machines, measured, global_batch_size=16, micro_batch_sizes=(1, 2), strategy="data")
    assert set(planned.plan.devices) == {device.id for device in machines.devices}
    possible = [candidate.name for candidate in planned.candidates if candidate.plan is not None]
    assert any("sharded state (ZeRO-1)" in name for name in possible)
    assert any("on the host" in name for name in possible)


def test_pipelines_that_fit_only_with_sharded_state_are_weighed() -> None:
    """Two pipelines of two stages wait less than one of four, and hold their stages only if they share the state."""
    model, machines = graph(2, width=1024, saved=4 * 64), cluster(4)
    measured = profile(model, machines, [linear(0.05)] * 4)
    context = CostModel(graph=model, cluster=machines, profile=measured).memory_use(machines.devices[0].id, 1).context
    memory = context + 2 * model.trainable_bytes  # of a model of 4 times that with gradients and state
    machines = replace(machines, devices=tuple(replace(d, memory_bytes=memory) for d in machines.devices))
    planned = plan(model, machines, measured, global_batch_size=4, micro_batch_sizes=(1, 2))
    assert len(planned.plan.pipelines) == 2
    assert planned.plan.zero == 1
    one = [c.step_s for c in planned.candidates if c.plan is not None and len(c.plan.pipelines) == 1]
    assert planned.chosen.step_s is not None
    assert all(step_s is not None and step_s > planned.chosen.step_s for step_s in one)
