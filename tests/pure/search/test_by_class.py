"""Devices that measure alike are counted as one class, and what is planned for classes is a plan for the devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster import Cluster, Device, Link
from heterodyne.cluster.fleet_cluster import fleet_of
from heterodyne.cost.class_times import ClassTimes
from heterodyne.cost.graph_layers import GraphLayers
from heterodyne.cost.layers import Widths
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.graph import ModelGraph
from heterodyne.plan.bind import bind
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.check import violations
from heterodyne.plan.lower import lower
from heterodyne.search.by_class import ByClass
from heterodyne.search.classes import ALIKE, class_cluster, class_names
from heterodyne.search.fit import fit_devices
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.written import PaperPlanner
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planner import plan
from heterodyne.search.split import Split
from heterodyne.sim.run import simulate
from pure.build import cluster, graph, linear, profile


def believed(rates: list[float], *, model: ModelGraph | None = None, memory: int = 2**40) -> CostModel:
    model = model or graph(6)
    machines = cluster(len(rates), memory=memory)
    measured = profile(model, machines, [linear(1 / rate) for rate in rates])
    bare = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)
    return CostModel(graph=model, cluster=machines, profile=measured, memory=bare)


def by_class(model: CostModel, samples: int) -> ByClass:
    sizes = model.profile.micro_batch_sizes
    runs = {
        fit.device.id: MicroBatchChoice(seconds=model.compute[fit.device.id].micro_batch_s, sizes=fit.sizes)
        for fit in fit_devices(model, sizes, samples)
        if fit.sizes
    }
    split = Split(model=model, runs=runs, samples=samples, sizes=sizes)
    return ByClass(split=split, able=Capabilities(model.graph))


def test_devices_that_measure_alike_are_one_class() -> None:
    names = class_names(believed([1.0, 1 + ALIKE / 2, 2.0, 1 - ALIKE / 2]))
    assert list(names.values()) == ["cpu#1", "cpu#1", "cpu#2", "cpu#1"]
    assert set(class_names(believed([1.0, 1.0])).values()) == {"cpu"}


def test_unlike_devices_are_classes_of_one() -> None:
    found, *_ = by_class(believed([1.0, 2.0, 4.0]), 7).candidates()
    assert found.plan is not None
    assert sorted(pipeline.micro_batches.samples for pipeline in found.plan.pipelines) == [1, 2, 4]


@given(
    rates=st.lists(st.sampled_from([1.0, 3.0]), min_size=2, max_size=6),
    samples=st.integers(4, 24),
    tight=st.booleans(),
)
@settings(max_examples=6)
def test_what_is_planned_for_classes_runs_on_the_devices(rates: list[float], samples: int, tight: bool) -> None:
    model = believed(rates, memory=60_000 if tight else 2**40)
    for candidate in by_class(model, samples).candidates():
        if candidate.plan is None:
            assert candidate.why_not
            continue
        assert violations(candidate.plan, model.graph, model.cluster) == ()
        assert candidate.step_s is not None
        assert candidate.step_s >= simulate(
            lower(candidate.plan, model.graph, model.cluster).program, model.of(candidate.plan)
        ).step_s * (1 - 1e-9)
        assert candidate.step_s >= samples / sum(rates) * (1 - 1e-9)  # all devices always at work


@pytest.mark.parametrize(("bytes_per_s", "apart"), [(1e30, 1e-9), (1e3, 0.05)], ids=["free messages", "slow messages"])
@pytest.mark.parametrize(
    ("rates", "samples", "memory"),
    [([2.0, 1.0, 3.0], 7, 60_000), ([3.0, 2.0, 1.0, 2.0], 12, 2**40), ([1.0, 3.0, 2.0, 1.0, 3.0], 4, 60_000)],
)
def test_what_the_fleet_search_predicts_is_what_the_simulator_plays(
    rates: list[float], samples: int, memory: int, bytes_per_s: float, apart: float
) -> None:
    """A slow message takes an eighth of a stage here: the estimate has it as a delay, the simulator on its link, behind other messages."""
    link = Link(between=("n0", "n0"), bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0)
    model, machines = graph(6), cluster(len(rates), memory=memory, link=link)
    believed = CostModel(
        graph=model, cluster=machines, profile=profile(model, machines, [linear(1 / rate) for rate in rates])
    )
    searched = by_class(believed, samples)
    names = class_names(believed)
    classes = class_cluster(believed, names)
    planner = FleetPlanner(fleet=fleet_of(classes), costs=searched._layers(names), global_batch=samples)
    compared = 0
    for row in PaperPlanner(planner=planner).plan(space=searched._space()).alternatives:
        if row.plan is None or row.plan.predicted is None:
            continue
        bound = bind(row.plan.model_copy(update={"predicted": None}), model, classes)
        bound = bound.model_copy(update={"cluster": machines.fingerprint})
        played_s = simulate(lower(bound, model, machines).program, believed.of(bound)).step_s
        assert row.plan.predicted.step_s == pytest.approx(played_s, rel=apart)
        compared += 1
    assert compared >= 3


def test_a_layer_costs_a_class_what_its_member_was_measured_to_take() -> None:
    model = believed([2.0, 2.0])
    times = ClassTimes(
        model=model,
        members={"cpu": [device.id for device in model.cluster.devices]},
        largest={"cpu": 8},
        stage=by_class(model, 8)._whole,
        ways=(),
    )
    layers = GraphLayers(times)
    costs = [layers.cost("cpu", kind, Widths(), 4) for kind in layers.layers]
    assert sum(cost.forward_s + cost.backward_s for cost in costs if cost is not None) == model.compute[
        "n0/cpu:0"
    ].micro_batch_s(4)
    assert layers.cost("cpu", layers.layers[0], Widths(), 16) is None


def test_links_of_classes_are_those_that_were_measured() -> None:
    devices = tuple(
        Device(id=f"{node}/gpu:{i}", kind="gpu", node=node, memory_bytes=2**40) for node in "ab" for i in range(2)
    )
    links = tuple(
        Link(between=between, bandwidth_bytes_per_s=speed, latency_s=1e-5)
        for between, speed in ((("a", "a"), 1e10), (("b", "b"), 1e10), (("a", "b"), 1e8))
    )
    machines = Cluster(name="two", devices=devices, links=links)
    model = replace(believed([1.0] * 4), cluster=machines, profile=profile(graph(6), machines, [linear(1.0)] * 4))
    found = class_cluster(model, class_names(model))
    assert {link.between: link.bandwidth_bytes_per_s for link in found.links} == {
        ("a", "a"): 1e10, ("a", "b"): 1e8, ("b", "b"): 1e10,
    }  # fmt: skip


@pytest.mark.parametrize(("devices", "layers", "samples"), [(4, 8, 1), (8, 4, 1)])
def test_a_batch_that_is_too_small_for_all_pipelines_is_planned(devices: int, layers: int, samples: int) -> None:
    """No device has room for half of the model, so pipelines stand beside each other, more of them than there are samples."""
    bare = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)
    model = replace(believed([1.0] * devices, model=graph(layers)), memory=bare)
    whole = model.memory_use("n0/cpu:0", 1).total
    machines = cluster(devices, memory=int(0.35 * whole))
    planned = plan(
        model.graph, machines, model.profile, global_batch_size=samples, micro_batch_sizes=(1, 2), memory=bare
    )
    assert all(pipeline.micro_batches.samples for pipeline in planned.plan.pipelines)
