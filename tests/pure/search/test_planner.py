"""The planner: the fastest by prediction, never worse than what it weighed, the same each time, and honest where nothing fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster import Cluster, Link
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import InfeasibleError, MeasureError, PlanError
from heterodyne.graph import ModuleOnly
from heterodyne.plan import MicroBatches, Plan
from heterodyne.plan.check import violations
from heterodyne.search.planned import Planned
from heterodyne.search.planner import plan
from pure.build import ROOMY, cluster, graph, linear, profile

MODEL = graph(4)
BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """A cluster of unequal devices with all that costs something, and a batch."""
    count = draw(st.integers(1, 4))
    machines = cluster(count, nodes=draw(st.integers(1, 2)))
    curves = [linear(draw(st.floats(0.01, 1)), draw(st.floats(0, 0.5))) for _ in range(count)]
    latency, beta = draw(st.floats(0, 0.2)), draw(st.floats(1e-9, 1e-4))
    measured = profile(
        MODEL,
        machines,
        curves,
        reduce=lambda size: latency + beta * size,
        optimizer_s=draw(st.floats(0, 0.2)),
        overhead_s=draw(st.floats(0, 0.1)),
        overlap=draw(st.floats(0, 1)),
    )
    return {
        "graph": MODEL,
        "cluster": machines,
        "profile": measured,
        "global_batch_size": draw(st.integers(1, 40)),
        "micro_batch_sizes": tuple(sorted(draw(st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1)))),
        "bucket_bytes": draw(st.sampled_from([1, 600, 10**6])),
        "strategy": "data",
    }


def searched(problem: dict[str, Any], **changes: Any) -> Planned:
    return plan(**{**problem, **changes})


def of_kind(planned: Planned, kind: str) -> float:
    return min((c.step_s for c in planned.candidates if c.kind == kind and c.step_s is not None), default=float("inf"))


@given(problems())
@settings(max_examples=60)
def test_the_plan_is_valid_and_the_fastest_of_all_weighed(problem: dict[str, Any]) -> None:
    planned = searched(problem)
    assert violations(planned.plan, problem["graph"], problem["cluster"]) == ()
    assert planned.chosen.weighed_s == min(c.weighed_s for c in planned.candidates)
    assert planned.chosen in planned.candidates
    assert planned.chosen.plan == planned.plan
    predicted = planned.plan.predicted
    assert predicted is not None
    assert predicted.step_s == planned.simulation.step_s
    assert planned.simulation.step_s <= of_kind(planned, "equal")
    assert planned.simulation.step_s <= of_kind(planned, "fastest")


@given(problems())
@settings(max_examples=40)
def test_efficiency_is_of_the_bound_and_never_above_one(problem: dict[str, Any]) -> None:
    planned = searched(problem)
    predicted = planned.plan.predicted
    assert predicted is not None
    assert 0 < predicted.efficiency <= 1 + 1e-9
    assert predicted.samples_per_s == pytest.approx(predicted.efficiency * sum(planned.rates.values()))


@given(problems())
@settings(max_examples=25)
def test_the_same_question_has_the_same_answer(problem: dict[str, Any]) -> None:
    assert searched(problem).plan.dump() == searched(problem).plan.dump()


@given(problems(), st.sampled_from(["equal", "fastest"]))
@settings(max_examples=40)
def test_what_is_asked_for_is_what_is_planned(problem: dict[str, Any], strategy: str) -> None:
    planned = searched(problem, strategy=strategy)
    shares = [p.micro_batches.samples for p in planned.plan.pipelines]
    assert sum(shares) == problem["global_batch_size"]
    assert max(shares) - min(shares) <= 1
    assert strategy == "equal" or len(shares) == 1
    assert searched(problem).simulation.step_s <= planned.simulation.step_s


@given(problems())
@settings(max_examples=25)
def test_a_plan_that_is_given_is_taken_and_weighed_against_the_others(problem: dict[str, Any]) -> None:
    equal = searched(problem, strategy="equal").plan
    planned = searched(problem, given=equal)
    assert planned.chosen.kind == "given"
    assert planned.plan.pipelines == equal.pipelines
    assert "it was given" in planned.plan.reason
    assert equal.predicted is not None
    assert planned.simulation.step_s == equal.predicted.step_s


def test_a_given_plan_that_cannot_run_is_refused() -> None:
    machines = cluster(2)
    problem = {"graph": MODEL, "cluster": machines, "profile": profile(MODEL, machines, [linear(1.0)] * 2)}
    other = Plan(model="x", cluster=machines.fingerprint, global_batch_size=4, pipelines=())
    with pytest.raises(PlanError, match="another model"):
        plan(**problem, global_batch_size=4, given=other)  # type: ignore[arg-type]


def test_what_only_the_module_does_is_never_cut() -> None:
    whole = replace(MODEL, module_only=(ModuleOnly(what="Round is an autograd.Function", source="net.py:3"),))
    machines = cluster(3)
    measured = profile(whole, machines, [linear(1.0)] * 3)
    planned = plan(whole, machines, measured, global_batch_size=6)
    assert all(len(p.stages) == 1 and not p.stages[0].recompute for p in planned.plan.pipelines)
    (left_out,) = [c for c in planned.candidates if c.plan is None]
    assert "Round is an autograd.Function (net.py:3)" in left_out.why_not
    with pytest.raises(InfeasibleError, match=r"no plan with strategy 'pipeline': .*net\.py:3.*strategy: data"):
        plan(whole, machines, measured, global_batch_size=6, strategy="pipeline")


@pytest.mark.tour("law 2", "search/")
def test_the_example_of_four_devices() -> None:
    machines = cluster(4)
    planned = plan(
        MODEL,
        machines,
        profile(MODEL, machines, [linear(0.01 / s) for s in (0.7, 0.35, 0.35, 0.2)]),
        global_batch_size=64,
    )
    assert [p.micro_batches.samples for p in planned.plan.pipelines] == [28, 14, 14, 8]
    assert planned.simulation.step_s == pytest.approx(0.4)
    assert planned.plan.predicted is not None
    assert planned.plan.predicted.efficiency == pytest.approx(1)
    assert of_kind(planned, "equal") == pytest.approx(0.8)
    assert of_kind(planned, "fastest") == pytest.approx(0.64 / 0.7)


@given(st.integers(1, 4), st.integers(1, 8), st.floats(0.01, 1), st.floats(0, 0.2), st.floats(0, 1))
@settings(max_examples=30)
def test_equal_devices_get_equal_shares(
    devices: int, each: int, seconds: float, latency: float, overlap: float
) -> None:
    machines = cluster(devices)
    measured = profile(
        MODEL, machines, [linear(seconds)] * devices, reduce=lambda size: latency + size * 1e-9, overlap=overlap
    )
    planned = plan(
        MODEL, machines, measured, global_batch_size=devices * each, micro_batch_sizes=(1, 2), strategy="data"
    )
    balanced = planned.candidates[0].plan
    assert balanced is not None
    assert {p.micro_batches.samples for p in balanced.pipelines} == {each}


def slow_reduce(devices: int, seconds: float, speeds: tuple[float, ...]) -> Planned:
    machines = cluster(devices)
    measured = profile(MODEL, machines, [linear(1 / s) for s in speeds], reduce=lambda size: seconds + size * 1e-12)
    return plan(MODEL, machines, measured, global_batch_size=64, bucket_bytes=10**9, strategy="data")


def test_sometimes_leaving_the_slowest_out_wins() -> None:
    """The fourth device saves a hundredth of the computing; its part in the reduction costs more."""
    assert len(slow_reduce(4, 0.0, (4.0, 4.0, 4.0, 0.5)).plan.pipelines) == 4
    planned = slow_reduce(4, 3.0, (4.0, 4.0, 4.0, 0.5))
    assert len(planned.plan.pipelines) < 4
    assert "n0/cpu:3" in planned.plan.idle
    assert planned.chosen.left_out
    assert slow_reduce(4, 0.0, (4.0, 4.0, 4.0, 0.001)).chosen.name == "balanced over 3 of 4 devices"


def test_a_slow_link_can_cost_more_than_its_node_is_worth() -> None:
    fast = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e12, latency_s=0.0)
    near = Link(between=("n1", "n1"), bandwidth_bytes_per_s=1e12, latency_s=0.0)
    slow = Link(between=("n0", "n1"), bandwidth_bytes_per_s=1e3, latency_s=1.0)
    # Fast and slow alternate between the nodes, so leaving out the slowest ones never leaves out the link.
    machines = Cluster(name="far", devices=cluster(4, nodes=2).devices, links=(fast, near, slow))
    curves = [linear(seconds) for seconds in (0.1, 0.1, 0.14, 0.2)]  # n0, n1, n0, n1
    planned = plan(MODEL, machines, profile(MODEL, machines, curves), global_batch_size=8, strategy="data")
    assert planned.chosen.name == "without node n1"
    assert {d.split("/")[0] for d in planned.plan.devices} == {"n0"}


def test_no_device_fits_says_what_each_lacks_and_what_helps() -> None:
    whole = (ModuleOnly(what="a hook", source="net.py:3"),)  # so nothing can be computed again
    model = replace(MODEL, module_only=whole)
    machines = cluster(2, memory=[10_000, 20_000])
    measured = profile(model, machines, [linear(1.0)] * 2)
    with pytest.raises(InfeasibleError) as caught:
        plan(model, machines, measured, global_batch_size=8, micro_batch_sizes=(2, 4), memory=BARE, strategy="data")
    cost = CostModel(graph=model, cluster=machines, profile=measured, recipe=Recipe(), memory=BARE)
    need = cost.memory_use("n0/cpu:0", 2).total
    assert caught.value.shortfalls == {"n0/cpu:0": need - 10_000, "n0/cpu:1": need - 20_000}
    message = str(caught.value)
    for words in (
        "n0/cpu:0 has 9.77 KiB",
        "n0/cpu:1 has 19.5 KiB",
        "it lacks",
        "what would help",
        "smaller",
        "sgd",
        "bf16",
    ):
        assert words in message


def test_micro_batches_of_one_are_proposed_where_they_would_fit() -> None:
    whole = (ModuleOnly(what="a hook", source="net.py:3"),)  # so nothing can be computed again
    model = replace(graph(4, saved=100_000), module_only=whole)
    one = CostModel(
        graph=model, cluster=cluster(1), profile=profile(model, cluster(1), [linear(1.0)]), memory=BARE
    ).memory_use("n0/cpu:0", 1)
    machines = cluster(1, memory=one.total)
    with pytest.raises(InfeasibleError, match="add 1 to parallelism"):
        plan(
            model,
            machines,
            profile(model, machines, [linear(1.0)]),
            global_batch_size=8,
            micro_batch_sizes=(4,),
            memory=BARE,
        )


def test_a_micro_batch_is_never_larger_than_the_batch() -> None:
    machines = cluster(1)
    made = plan(
        MODEL, machines, profile(MODEL, machines, [linear(1.0)]), global_batch_size=3, micro_batch_sizes=(8,)
    ).plan
    assert made.pipelines[0].micro_batches == MicroBatches((3,))


def test_fewer_samples_than_devices_leave_some_idle() -> None:
    machines = cluster(4)
    made = plan(MODEL, machines, profile(MODEL, machines, [linear(1.0)] * 4), global_batch_size=2, strategy="data").plan
    assert [p.micro_batches.samples for p in made.pipelines] == [1, 1]
    assert len(made.idle) == 2


def test_what_was_not_measured_is_said() -> None:
    with pytest.raises(MeasureError, match="n0/cpu:1 was not measured"):
        plan(MODEL, cluster(2), profile(MODEL, cluster(1), [linear(1.0)]), global_batch_size=2)


def test_numbers_that_mean_nothing_are_refused() -> None:
    machines = cluster(1)
    measured = profile(MODEL, machines, [linear(1.0)])
    for batch, sizes in ((0, (1,)), (4, ()), (4, (0,))):
        with pytest.raises(ValueError, match="must be positive"):
            plan(MODEL, machines, measured, global_batch_size=batch, micro_batch_sizes=sizes)
    with pytest.raises(InfeasibleError, match="is more than 65,536 for each of 1 device"):
        plan(MODEL, machines, measured, global_batch_size=10**9, micro_batch_sizes=(1, 2))


def test_a_large_cluster_is_planned_with_a_bounded_number_of_candidates() -> None:
    machines = cluster(40, memory=ROOMY)
    measured = profile(MODEL, machines, [linear(0.1 + 0.01 * i) for i in range(40)])
    planned = plan(MODEL, machines, measured, global_batch_size=80, strategy="data")
    assert len(planned.candidates) <= 30
    assert planned.simulation.step_s <= of_kind(planned, "equal")


def test_devices_that_hold_the_model_only_together_shard_its_state() -> None:
    """Each has room for weights, gradients and half of the two moments of AdamW; the larger one keeps more of them."""
    model = graph(4, width=64, saved=10)
    bare = CostModel(graph=model, cluster=cluster(2), profile=profile(model, cluster(2), [linear(1.0)] * 2))
    use = bare.memory_use("n0/cpu:0", 1)
    short = [use.with_state(part).total + use.optimizer // 100 for part in (0.3, 0.7)]
    machines = cluster(2, memory=short)
    found = plan(
        model,
        machines,
        profile(model, machines, [linear(1.0)] * 2),
        global_batch_size=4,
        micro_batch_sizes=(1,),
        strategy="data",
    )
    assert found.plan.zero == 1
    small, large = (p.stages[0].state_shares[0] for p in found.plan.pipelines)
    assert small / (small + large) == pytest.approx(0.3, abs=0.02)
    assert all(found.plan.predicted.memory_bytes[device.id] <= device.memory_bytes for device in machines.devices)
    assert violations(found.plan, model, machines) == ()
    smaller = cluster(2, memory=[short[0], short[0]])
    measured = profile(model, machines, [linear(1.0)] * 2)
    with pytest.raises(InfeasibleError):
        plan(model, smaller, measured, global_batch_size=4, micro_batch_sizes=(1,), strategy="data")


@pytest.mark.parametrize(("host_s", "chosen"), [(0.01, True), (100.0, False)])
def test_hosts_keep_state_only_where_that_pays(host_s: float, chosen: bool) -> None:
    """One device has room for weights and gradients, and another one for everything: alone, or helped by the first one's host."""
    model = graph(4, width=64, saved=10)
    machines = cluster(2)
    machines = replace(machines, devices=tuple(replace(device, backend="cuda") for device in machines.devices))
    bare = CostModel(graph=model, cluster=machines, profile=profile(model, machines, [linear(1.0)] * 2))
    short = bare.memory_use("n0/cpu:0", 1).with_state(0.1).total
    first, second = machines.devices
    machines = replace(machines, devices=(replace(first, memory_bytes=short), second))
    measured = profile(model, machines, [linear(1.0)] * 2, optimizer_s=0.01)
    per_byte = host_s / model.trainable_bytes
    known = {name: replace(own, host_update_s_per_byte=per_byte) for name, own in measured.devices.items()}
    found = plan(
        model,
        machines,
        replace(measured, devices=known),
        global_batch_size=4,
        micro_batch_sizes=(1,),
        strategy="data",
        bucket_bytes=10**6,
    )
    assert violations(found.plan, model, machines) == ()
    told = [c for c in found.candidates if "on the host" in c.name]
    assert told
    assert (found.chosen in told) == chosen


def test_a_pipeline_whose_state_fits_nowhere_leaves_it_to_the_hosts() -> None:
    model = graph(4, width=64, saved=10)
    machines = cluster(2)
    machines = replace(machines, devices=tuple(replace(device, backend="cuda") for device in machines.devices))
    bare = CostModel(graph=model, cluster=machines, profile=profile(model, machines, [linear(1.0)] * 2))
    whole, half = bare.memory_use("n0/cpu:0", 1), bare.memory_use("n0/cpu:0", 1, [(0, 5)])
    memory = (half.with_state(0.3).total + whole.context + (whole.total - whole.context) // 2) // 2
    machines = replace(machines, devices=tuple(replace(d, memory_bytes=memory) for d in machines.devices))
    measured = profile(model, machines, [linear(1.0)] * 2, optimizer_s=0.01)

    def planned(per_byte: float) -> Planned:
        known = {name: replace(own, host_update_s_per_byte=per_byte) for name, own in measured.devices.items()}
        own = replace(measured, devices=known)
        return plan(model, machines, own, global_batch_size=4, micro_batch_sizes=(1,), bucket_bytes=1)

    with pytest.raises(InfeasibleError):
        planned(0.0)
    found = planned(0.01 / model.trainable_bytes)
    assert all(stage.offload for pipeline in found.plan.pipelines for stage in pipeline.stages)
    assert all(found.plan.predicted.memory_bytes[device.id] <= memory for device in machines.devices)


@pytest.mark.parametrize("part", [0.5, 0.45])
def test_devices_that_hold_the_model_only_together_share_it_by_room(part: float) -> None:
    """Parameters too are sharded where not even they fit: devices share the samples by speed, and the model by memory."""
    model = graph(12, width=256, saved=10)
    machines = cluster(3)
    asked = {"global_batch_size": 9, "micro_batch_sizes": (1, 2), "strategy": "data"}
    own = CostModel(graph=model, cluster=machines, profile=profile(model, machines, [linear(1.0)] * 3))
    use = own.memory_use("n0/cpu:0", 0)
    tensors = use.fixed - use.context
    memory = [use.context + round(times * part * tensors) for times in (1, 1, 2)]
    machines = cluster(3, memory=memory)
    found = plan(model, machines, profile(model, machines, [linear(1.0), linear(2.0), linear(2.0)]), **asked).plan
    assert found.zero == 3
    stage = found.pipelines[0].stages[0]
    assert stage.shares[0] > stage.shares[1]
    assert (stage.state_shares or (1, 1, 1))[2] >= (stage.state_shares or (1, 1, 1))[1]
    assert violations(found, model, machines) == ()
    assert all(found.predicted.memory_bytes[device.id] <= device.memory_bytes for device in machines.devices)


def test_sharded_parameters_stay_gathered_between_the_passes_as_far_as_memory_allows() -> None:
    model, fast = graph(12, width=256, saved=10), cluster(3)
    use = CostModel(graph=model, cluster=fast, profile=profile(model, fast, [linear(1.0)] * 3)).memory_use(
        "n0/cpu:0", 0
    )
    kept, steps = [], []
    for part in (0.5, 0.55, 0.6):  # the rooms in which neighbours exchange are in it
        machines = cluster(3, memory=[use.context + round(part * (use.fixed - use.context))] * 3)
        measured = profile(model, machines, [linear(0.001)] * 3, reduce=lambda size: size * 1e-8)
        found = plan(model, machines, measured, global_batch_size=9, micro_batch_sizes=(1, 2), strategy="data")
        assert found.plan.zero == 3
        assert all(found.plan.predicted.memory_bytes[device.id] <= device.memory_bytes for device in machines.devices)
        kept.append(sum(not stage.reshard_after_forward for stage in found.plan.pipelines[0].stages))
        steps.append(found.chosen.step_s)
    assert kept == sorted(kept)
    assert kept[-1] > kept[0]
    assert steps == sorted(steps, reverse=True)
