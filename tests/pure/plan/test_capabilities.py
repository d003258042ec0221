"""One table says what runs: every plan under it passes the rules and lowers, every other one is refused with the reason of its trait."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from heterodyne.cluster import Cluster
from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.graph import ModelGraph
from heterodyne.graph.task_graphs import TaskGraph
from heterodyne.plan import Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.plan.capabilities import CUTTING, FEATURES, TRAITS, Capabilities, Feature, Trait, asked_by, uses
from heterodyne.plan.check import violations
from heterodyne.plan.kept import names_of
from heterodyne.plan.lower import lower
from heterodyne.search.planner import plan as planned
from heterodyne.sim.run import simulate
from pure.build import cluster, linear, profile
from pure.plan.kinds import ABLE, CHAIN, DEVICES, PLANS, plan_with


@st.composite
def any_plan(draw: st.DrawFn, model: ModelGraph, machines: Cluster) -> Plan:
    """Pipelines of one or two stages on one or two devices each, shared by samples."""
    ids = [device.id for device in machines.devices]
    middle, pipelines = draw(st.integers(1, len(model.ops) - 1)), []
    while ids and len(pipelines) < 3:
        cut = draw(st.booleans()) and len(ids) > 1
        stages = []
        for start, stop in ((0, middle), (middle, len(model.ops))) if cut else ((0, len(model.ops)),):
            width = 2 if len(ids) > 1 + (cut and start == 0) and draw(st.booleans()) else 1
            devices, ids = tuple(ids[:width]), ids[width:]
            whole = [b.index for b in model.blocks if start <= b.start and b.stop <= stop]
            again = tuple(whole[: draw(st.integers(0, 1))])
            hosted = tuple(whole[1 : 1 + draw(st.integers(0, 1))])
            names = [name for index in again for name in names_of(model, model.blocks[index])]
            stages.append(
                Stage(
                    ops=(start, stop),
                    devices=devices,
                    regions=(Region(layout=Layout(shares=tuple(draw(st.integers(1, 3)) for _ in devices))),),
                    recompute=again,
                    offload_activations=hosted,
                    reload_ahead=draw(st.sampled_from([None, 0, 1, 2])) if hosted else None,
                    reshard_after_forward=draw(st.booleans()),
                    keep=draw(st.lists(st.sampled_from(names), max_size=1).map(tuple)) if names else (),
                )
            )
        sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        pipelines.append(Pipeline(micro_batches=MicroBatches(tuple(sizes)), stages=tuple(stages)))
        if draw(st.booleans()):
            break
    shared = len(pipelines) > 1 or any(len(stage.devices) > 1 for stage in pipelines[0].stages)
    return Plan(
        model=model.fingerprint,
        cluster=machines.fingerprint,
        global_batch_size=sum(p.micro_batches.samples for p in pipelines),
        schedule=draw(st.sampled_from(["1F1B", "GPipe", "ZBH1"])),
        bucket_bytes=600,
        zero=draw(st.sampled_from([0, 0, 1, 1, 2, 3])) if shared else 0,
        pipelines=tuple(pipelines),
        idle=tuple(ids),
    )


@given(trait=st.sampled_from(sorted(ABLE)), devices=st.integers(1, 5), data=st.data())
def test_what_the_table_allows_lowers_and_plays_and_nothing_else(trait: str, devices: int, data: st.DataObject) -> None:
    able, machines = ABLE[trait], cluster(devices)
    model = able.graph
    drawn = data.draw(any_plan(model, machines))
    refused = [use for use in uses(drawn) if not able.allow(use.feature)]
    broken = violations(drawn, model, machines, able)
    assert len(broken) == len(refused)
    for use, sentence in zip(refused, broken, strict=True):
        assert sentence.startswith(f"{use.where} {use.how}, and {able.why_not(use.feature)}")
        assert sentence.endswith(FEATURES[use.feature].remedy)
    if not refused:
        times = CostModel(graph=model, cluster=machines, profile=profile(model, machines, [linear(1.0)] * devices)).of(
            drawn
        )
        assert simulate(lower(drawn, model, machines, able=able).program, times).step_s > 0


@given(
    trait=st.sampled_from(sorted(ABLE)),
    rates=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    batch=st.integers(1, 9),
)
def test_the_search_proposes_only_what_the_table_allows(trait: str, rates: list[int], batch: int) -> None:
    able, machines = ABLE[trait], cluster(len(rates))
    speeds = [linear(1.0 / r) for r in rates]
    try:
        found = planned(able.graph, machines, profile(able.graph, machines, speeds), global_batch_size=batch, able=able)
    except InfeasibleError:
        assume(False)
    for candidate in found.candidates:
        assert candidate.plan is None or all(able.allow(use.feature) for use in uses(candidate.plan))


def test_whole_weights_are_not_split() -> None:
    assert Capabilities(CHAIN).allow("tensor_parallel")
    assert Capabilities(CHAIN, "weight").why_not("tensor_parallel") == "the optimizer updates whole weights only"


def test_every_trait_and_every_feature_has_its_case() -> None:
    assert all(trait.refuses <= set(FEATURES) for trait in TRAITS)
    assert [trait.name for trait in TRAITS] == list(ABLE)
    assert set(PLANS) == set(FEATURES)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("trait", TRAITS, ids=lambda trait: trait.name)
def test_table_rules_and_lowering_agree_of_each_trait_and_feature(trait: Trait, feature: Feature) -> None:
    able = ABLE[trait.name]
    made = plan_with(feature, able.graph)
    used = {use.feature for use in uses(made)}
    assert feature in used
    assert feature not in trait.refuses or not able.allow(feature)
    refused = {each for each in used if not able.allow(each)}
    broken = violations(made, able.graph, DEVICES, able)
    assert {name for name in used if any(FEATURES[name].remedy in sentence for sentence in broken)} >= refused
    assert bool(broken) == bool(refused), broken
    with pytest.raises(PlanError) if refused else nullcontext():
        lower(made, able.graph, DEVICES, able=able)


@pytest.mark.parametrize("able", ABLE.values(), ids=ABLE)
def test_a_strategy_cuts_a_model_where_its_feature_is_allowed(able: Capabilities) -> None:
    allowed = [able.allow(feature) for feature in CUTTING.values()]
    assert able.cuts("auto") == any(allowed)
    for strategy, feature in CUTTING.items():
        assert able.cuts(strategy)
        assert asked_by(strategy, able.graph) == (feature,)
    for strategy in ("data", "equal", "fastest"):
        assert not able.cuts(strategy)
        assert asked_by(strategy, able.graph) == ()


def test_a_model_that_is_marked_asks_for_parts_where_nothing_else_is_asked_for() -> None:
    marked = replace(CHAIN, task_graphs=(TaskGraph(name="head", kind="split", device_count=None, source="net.py:3"),))
    assert [asked_by(strategy, marked) for strategy in ("auto", "data")] == [("tensor_parallel",), ()]
