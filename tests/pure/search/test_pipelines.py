"""Pipelines that the planner makes: they can run, they fit, they are no slower than what they are compared with, and it says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster import Link
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError
from heterodyne.graph import ModelGraph
from heterodyne.plan import MicroBatches, Pipeline, Plan
from heterodyne.plan.check import violations
from heterodyne.search.explain import alternatives, paragraph, shares
from heterodyne.search.planned import Planned
from heterodyne.search.planner import plan
from heterodyne.search.points import points_of
from heterodyne.search.predict import plan_of, predict, stage_of
from pure.build import cluster, graph, linear, profile

BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)
LINK = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e9, latency_s=1e-5)
SPEEDS = (0.7, 0.35, 0.35, 0.2)


def asked(
    model: ModelGraph, speeds: tuple[float, ...], memory: Any = 2**36, *, samples: int = 16, **options: Any
) -> Planned:
    machines = cluster(len(speeds), memory=memory, link=LINK)
    measured = profile(model, machines, [linear(1 / s) for s in speeds], reduce=lambda size: 1e-3 + size * 1e-9)
    return plan(
        model,
        machines,
        measured,
        **{"global_batch_size": samples, "micro_batch_sizes": (1,), "strategy": "pipeline", "memory": BARE, **options},
    )


def drawn(problem: dict[str, Any]) -> Planned:
    model = graph(problem["layers"], saved=problem["saved"])
    return asked(model, **{key: value for key, value in problem.items() if key not in ("layers", "saved")})


def whole_bytes(model: ModelGraph) -> int:
    machines = cluster(1)
    costs = CostModel(graph=model, cluster=machines, profile=profile(model, machines, [linear(1.0)]), memory=BARE)
    return costs.memory_use("n0/cpu:0", 1).total


def step_of(planned: Planned, kind: str) -> float:
    return min((c.step_s for c in planned.candidates if c.kind == kind and c.step_s is not None), default=float("inf"))


def stages_of(made: Plan) -> list[int]:
    return [len(pipeline.stages) for pipeline in made.pipelines]


def test_unequal_devices_and_alike_blocks_come_near_the_bound() -> None:
    """Speeds 0.7, 0.35, 0.35, 0.2; 16 alike blocks; 16 micro-batches: blocks alone cannot be divided 7 : 3.5 : 3.5 : 2."""
    planned = asked(graph(16), SPEEDS)
    bound = 16 / sum(SPEEDS)
    assert bound <= planned.simulation.step_s <= bound / 0.88
    assert step_of(planned, "even") >= 1.6 * planned.simulation.step_s


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(2, 4))
    layers, saved = draw(st.integers(2, 8)), draw(st.sampled_from([100, 4000]))
    need = whole_bytes(graph(layers, saved=saved))
    return {
        "layers": layers,
        "saved": saved,
        "speeds": tuple(draw(st.sampled_from([1.0, 0.7, 0.35, 0.2])) for _ in range(count)),
        "memory": [draw(st.sampled_from([need // 3, need // 2, need, 4 * need])) for _ in range(count)],
        "samples": draw(st.integers(1, 12)),
        "micro_batch_sizes": draw(st.sampled_from([(1,), (1, 2), (2, 4)])),
        "strategy": draw(st.sampled_from(["auto", "pipeline"])),
        "bucket_bytes": 300,
    }


@given(problems())
@settings(max_examples=25)
def test_what_is_planned_can_run_fits_and_is_the_fastest_weighed(problem: dict[str, Any]) -> None:
    try:
        planned = drawn(problem)
    except InfeasibleError:
        return
    machines = planned.cluster
    assert violations(planned.plan, planned.graph, machines) == ()
    for rank, device in enumerate(machines.devices):
        assert planned.simulation.peak_bytes[rank] <= device.memory_bytes
    serving = [
        c.weighed_s
        for c in planned.candidates
        if c.step_s is not None and (problem["strategy"] == "auto" or c.kind in ("pipeline", "replicas", "even"))
    ]
    assert planned.chosen.weighed_s <= min(serving, default=float("inf"))
    predicted = planned.plan.predicted
    assert predicted is not None
    assert 0 < predicted.efficiency <= 1 + 1e-9
    assert set(planned.compute_s) == set(planned.plan.devices)
    assert Plan.parse(planned.plan.dump()) == planned.plan


@given(problems())
@settings(max_examples=8)
def test_the_same_question_has_the_same_answer(problem: dict[str, Any]) -> None:
    try:
        first = drawn(problem).plan.dump()
    except InfeasibleError:
        return
    assert drawn(problem).plan.dump() == first


def test_a_model_that_fits_on_no_device_is_cut() -> None:
    model = graph(8)
    need = whole_bytes(model)
    planned = asked(model, (1.0, 1.0, 0.5), need // 2, strategy="auto")
    assert min(stages_of(planned.plan)) > 1
    assert planned.unfit == {}
    together = asked(model, (1.0, 1.0, 0.5), need // 2, strategy="data").plan
    assert (together.zero, len(together.pipelines)) == (3, 1)
    with pytest.raises(InfeasibleError, match="no device can hold"):
        asked(model, (1.0, 1.0, 0.5), 2**10, strategy="data")


def test_memory_that_one_plan_asks_for_to_the_byte_is_enough() -> None:
    """Devices have just the peaks of a pipeline that has one micro-batch at a time and its backwards in halves."""
    model = graph(12, width=64, saved=1000)
    roomy = cluster(3)
    measured = profile(model, roomy, [linear(1.0)] * 3, saved=2000)
    peaks = 16 * 64 * 64  # of a gradient that is handed over, say
    devices = {
        name: replace(
            of,
            blocks={
                k: tuple(replace(s, peak_bytes=s.saved_bytes + peaks) for s in own) for k, own in of.blocks.items()
            },
        )
        for name, of in measured.devices.items()
    }
    measured = replace(measured, devices=devices)
    costs = CostModel(graph=model, cluster=roomy, profile=measured, memory=BARE)
    order = tuple(" ".join(f"{n}{kind}{i}" for i in range(2) for kind in "FIW") for n in range(3))
    stages = tuple(
        stage_of(ops, (device.id,)) for ops, device in zip(((0, 13), (13, 21), (21, 26)), roomy.devices, strict=True)
    )
    pipeline = Pipeline(micro_batches=MicroBatches((2, 2)), stages=stages, order=order)
    _, played = predict(costs, plan_of(costs, 4, (pipeline,)), {})
    tight = cluster(3, memory=played.peak_bytes)
    planned = plan(
        model,
        tight,
        measured,
        global_batch_size=4,
        micro_batch_sizes=(2,),
        strategy="pipeline",
        memory=BARE,
        bucket_bytes=4 * 2**20,
    )
    assert len(planned.plan.pipelines[0].stages) > 1
    assert all(
        peak <= device.memory_bytes for peak, device in zip(planned.simulation.peak_bytes, tight.devices, strict=True)
    )


def test_where_nothing_fits_both_reasons_are_told() -> None:
    model = graph(8)
    with pytest.raises(InfeasibleError) as caught:
        asked(model, (1.0, 1.0), whole_bytes(model) // 5, strategy="auto")
    assert "no device can hold a copy of the model" in str(caught.value)
    assert "nor can they hold it together" in str(caught.value)
    assert set(caught.value.shortfalls) == {"n0/cpu:0", "n0/cpu:1"}


def test_a_device_that_can_hold_no_block_stays_idle_and_is_told() -> None:
    model = graph(8)
    planned = asked(model, (1.0, 1.0, 1.0), [2**36, 2**36, 100])
    assert "n0/cpu:2" in planned.plan.idle
    assert "it lacks" in planned.unfit["n0/cpu:2"]


def test_a_device_that_has_room_only_with_recompute_takes_its_share_of_the_samples() -> None:
    """Of two as fast ones the first keeps everything; the second recomputes what it has no room for, and has a smaller share.

    Not so where ops can keep what they make, which is small beside what they save here: then nothing is done twice.
    """
    plain = graph(8, saved=200_000)
    model = replace(plain, random=tuple(op.name for op in plain.ops))  # nothing that draws can be kept
    kept = whole_bytes(model)
    planned = asked(model, (1.0, 1.0), [kept * 2, kept * 2 // 3], samples=48, strategy="data")
    (roomy,), (tight,) = (pipeline.stages for pipeline in planned.plan.pipelines)
    assert roomy.recompute == ()
    assert 0 < len(tight.recompute) < len(model.blocks)
    assert tight.keep == ()
    first, second = (pipeline.micro_batches.samples for pipeline in planned.plan.pipelines)
    assert first > second > 0
    peaks = planned.plan.predicted.memory_bytes if planned.plan.predicted else {}
    assert peaks["n0/cpu:1"] <= kept * 2 // 3 < peaks["n0/cpu:0"]
    planned = asked(plain, (1.0, 1.0), [kept * 2, kept * 2 // 3], samples=48, strategy="data")
    (selective,) = planned.plan.pipelines[1].stages
    assert 0 < len(selective.recompute) < len(model.blocks)
    assert selective.keep
    assert [pipeline.micro_batches.samples for pipeline in planned.plan.pipelines] == [24, 24]


def test_activations_that_do_not_fit_are_recomputed_and_nothing_is_where_they_fit() -> None:
    """Activations are nearly all of the memory, and no device has a third of what one micro-batch needs."""
    model = graph(12, saved=200_000)
    kept = whole_bytes(model)
    tight = asked(model, (1.0, 1.0, 1.0), kept * 3 // 10, samples=12)
    again = [stage.recompute for p in tight.plan.pipelines for stage in p.stages]
    assert any(again)
    assert not all(len(blocks) == 14 for blocks in again)
    roomy = asked(model, (1.0, 1.0, 1.0), 100 * kept, samples=12)
    assert not any(stage.recompute for p in roomy.plan.pipelines for stage in p.stages)
    # To run every forward twice takes a third more than F + B; with as much waiting, nothing is to be slower than that.
    assert roomy.simulation.step_s < tight.simulation.step_s <= 4 / 3 * 1.5 * roomy.simulation.step_s


def test_strategies_name_the_ways() -> None:
    model = graph(6)
    data, cut = asked(model, SPEEDS, strategy="data"), asked(model, SPEEDS)
    assert stages_of(data.plan) == [1] * len(data.plan.pipelines)
    assert max(stages_of(cut.plan)) > 1
    best = asked(model, SPEEDS, strategy="auto")
    assert best.chosen.weighed_s <= min(data.chosen.weighed_s, cut.chosen.weighed_s)
    with pytest.raises(InfeasibleError, match="two devices"):
        asked(model, (1.0,))


def test_statistics_over_the_batch_keep_the_number_of_micro_batches() -> None:
    model = graph(6, batch_statistics=True, places=(2,))
    planned = asked(model, (1.0, 1.0), strategy="auto", samples=8, micro_batch_sizes=(1, 2, 4, 8))
    counts = {len(p.micro_batches) for c in planned.candidates if c.plan is not None for p in c.plan.pipelines}
    assert len(counts) == 1
    assert asked(model, (1.0, 1.0), samples=8, micro_batch_sizes=(1, 2, 4, 8)).chosen.kind in ("pipeline", "even")
    small = whole_bytes(model) * 54 // 100
    alone = asked(model, (1.0, 1.0), small, strategy="auto", samples=8, micro_batch_sizes=(1, 2, 4, 8))
    assert len(alone.plan.pipelines) == 1
    assert len(alone.plan.pipelines[0].stages) > 1


def test_the_words_tell_stages_blocks_schedule_and_alternatives() -> None:
    planned = asked(graph(8), (0.7, 0.35, 0.2), strategy="pipeline")
    text = paragraph(planned)
    for words in (
        "A pipeline of",
        "stage 0 (embed to",
        "head",
        "with",
        "its devices wait",
        "an even cut with 1F1B would take",
    ):
        assert words in text
    assert "candidates with the model cut into stages" in planned.plan.reason
    names = [row.name for row in alternatives(planned)]
    assert "an even cut with 1F1B" in names
    assert any(name.startswith("balanced over all 3 devices") for name in names)
    rows = shares(planned)
    assert all(row.samples <= 16 for row in rows)
    assert all(
        row.part
        for row in rows
        if row.samples and max(stages_of(planned.plan)) > 1 and len(planned.plan.pipelines) == 1
    )


def test_the_points_are_borders_of_blocks_and_alike_inside_alike_blocks() -> None:
    model = graph(4)
    assert points_of(model).positions == (0, *(block.start for block in model.blocks[1:]), len(model.ops))
    inside = set(points_of(model, inside=3).positions) - set(points_of(model).positions)
    assert inside == {block.start + 1 for block in model.blocks if block.kind == "layer"}
