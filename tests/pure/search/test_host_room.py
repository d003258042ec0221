"""The memory of hosts: a plan that keeps more there than there is, is refused, and none such is proposed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import OptimizerName, Recipe
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan import MicroBatches, Pipeline, Plan
from heterodyne.search.host_room import HostBytes, kept_on_hosts
from heterodyne.search.planner import plan
from heterodyne.search.predict import plan_of, predict, stage_of
from pure.build import cluster, graph, linear, profile

MODEL = graph(4, width=64, saved=100_000)
MEMORY = MemoryAssumptions(other_context_bytes=0, fragmentation=0.0)


def known(machines: Cluster, model: ModelGraph = MODEL) -> Profile:
    measured = profile(model, machines, [linear(1.0)] * len(machines.devices), optimizer_s=0.01)
    own = {
        name: replace(of, host_copy_s_per_byte=1e-12, host_update_s_per_byte=1e-9)
        for name, of in measured.devices.items()
    }
    return replace(measured, devices=own)


def gpus(count: int, *, memory: int, host: int | None) -> Cluster:
    made = cluster(count, memory=memory, named="gpu")
    devices = tuple(replace(d, backend="cuda") for d in made.devices)
    return replace(made, devices=devices, hosts={} if host is None else {"n0": host})


@pytest.mark.parametrize(("optimizer", "values"), [("adamw", 4), ("sgd", 3)])
def test_what_is_kept_on_a_host_is_that_of_all_its_devices(optimizer: OptimizerName, values: int) -> None:
    machines = gpus(2, memory=2**40, host=None)
    model = CostModel(
        graph=MODEL, cluster=machines, profile=known(machines), memory=MEMORY, recipe=Recipe(optimizer=optimizer)
    )
    pipelines = tuple(
        Pipeline(
            micro_batches=MicroBatches((3,)),
            stages=(
                stage_of((0, len(MODEL.ops)), (device.id,)).model_copy(
                    update={"offload": True, "offload_activations": (1, 2)}
                ),
            ),
        )
        for device in machines.devices
    )
    made, played = predict(model, plan_of(model, 6, pipelines), {})
    weights = sum(p.numel for p in MODEL.parameters if p.trainable)
    (kept,) = kept_on_hosts(model, made, played).values()
    # In fp32 each weight, its gradient, and two moments or one.
    assert kept == HostBytes(state=2 * 4 * values * weights, activations=sum(played.host_bytes))
    assert kept.activations == 2 * 3 * 2 * 200_000

    def given(host: int | None) -> None:
        there = gpus(2, memory=2**40, host=host)
        asked = made.model_copy(update={"cluster": there.fingerprint})
        plan(
            MODEL,
            there,
            known(there),
            global_batch_size=6,
            micro_batch_sizes=(3,),
            memory=MEMORY,
            given=asked,
            optimizer=optimizer,
        )

    given(None)  # nobody knows
    given(kept.total)
    with pytest.raises(
        PlanError, match=r"in the memory of host n0, which has .* too little; leave 'offload' or 'offload_activ"
    ):
        given(kept.total - 2**20)


def test_hosts_without_room_are_not_planned_with_and_the_reason_is_told() -> None:
    """Only with its state on the host does the model fit on the device."""
    model, free = graph(4, width=64, saved=10), gpus(1, memory=2**40, host=None)
    use = CostModel(graph=model, cluster=free, profile=known(free, model), memory=MEMORY).memory_use("n0/gpu:0", 1)

    def planned(host: int | None) -> Plan:
        machines = gpus(1, memory=use.total - use.optimizer + 1000, host=host)
        asked = {"global_batch_size": 2, "micro_batch_sizes": (1,), "memory": MEMORY}
        return plan(model, machines, known(machines, model), **asked).plan

    weights = sum(p.numel for p in model.parameters if p.trainable)
    for enough in (None, 16 * weights):
        assert planned(enough).pipelines[0].stages[0].offload
    with pytest.raises(
        InfeasibleError, match=r"optimizer state .* in the memory of host n0, which has .* 1 B too little"
    ):
        planned(16 * weights - 1)
