"""Pipelines with stages in parts: whole, within memory, and taken where nothing else fits or is as fast."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from heterodyne.cluster import Link
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.plan.check import violations
from heterodyne.search.planned import IN_TURNS_PAYS, Candidate, Planned
from heterodyne.search.planner import plan
from pure.build import cluster, linear, profile
from pure.cost.transformer import transformer

BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)
FAST = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e12, latency_s=1e-9)


def asked(machines: Cluster, speeds: tuple[float, ...], *, layers: int = 8, strategy: str = "split") -> Planned:
    model = transformer(layers)
    measured = profile(model, machines, [linear(speed) for speed in speeds])
    return plan(
        model,
        machines,
        measured,
        global_batch_size=8,
        micro_batch_sizes=(1, 2),
        strategy=strategy,  # type: ignore[arg-type]  # one of them
        memory=BARE,
    )


def mixed(planned: Planned) -> list[Candidate]:
    """Pipelines, one of whose stages lies in parts."""
    plans = [(c, c.plan.pipelines) for c in planned.candidates if c.plan is not None]
    return [c for c, own in plans if any(len(p.stages) > 1 and any(s.sharded for s in p.stages) for p in own)]


def test_where_no_device_has_room_for_the_model_pairs_are_stages_in_parts() -> None:
    """Two devices are three times as slow as the two others, and no block could be moved to make up for what they wait."""
    layers, speeds = 16, (1.0, 1.0, 3.0, 3.0)
    model, machines = transformer(layers), cluster(4, link=FAST)
    costs = CostModel(
        graph=model, cluster=machines, profile=profile(model, machines, [linear(s) for s in speeds]), memory=BARE
    )
    whole = costs.memory_use(machines.devices[0].id, 1).total
    planned = asked(cluster(4, link=FAST, memory=whole * 6 // 10), speeds, layers=layers)
    found = min(mixed(planned), key=lambda c: c.weighed_s)
    assert found.plan is not None
    assert found.simulation is not None
    assert violations(found.plan, planned.graph, planned.cluster) == ()
    (pipeline,) = found.plan.pipelines
    assert all(before.ops[1] == after.ops[0] for before, after in pairwise(pipeline.stages))
    ops = {stage.devices: stage.ops[1] - stage.ops[0] for stage in pipeline.stages}
    slow = sum(count for devices, count in ops.items() if planned.cluster.devices[3].id in devices)
    assert 0 < slow < sum(ops.values()) / 2
    wait = found.simulation.wait_s
    whole_of_the_slow_pair = 8 * 3.0 / 2
    assert max(wait) - min(wait) <= 1.1 * whole_of_the_slow_pair / (layers + 2)


def test_nothing_that_was_weighed_is_faster_than_what_is_chosen_but_for_doubt() -> None:
    planned = asked(cluster(4, link=FAST), (1.0, 1.0, 3.0, 3.0), strategy="auto")
    steps = [c.step_s for c in planned.candidates if c.step_s is not None]
    assert planned.chosen.step_s is not None
    assert planned.chosen.step_s <= min(steps) / 0.9


def test_halves_in_turns_have_to_be_clearly_faster() -> None:
    planned = asked(cluster(2, link=FAST), (1.0, 2.0))
    (waiting, *_) = [c for c in planned.candidates if c.kind == "split" and c.plan is not None]
    assert waiting.plan is not None
    pipelines = tuple(
        pipeline.model_copy(
            update={"stages": tuple(stage.model_copy(update={"overlap": True}) for stage in pipeline.stages)}
        )
        for pipeline in waiting.plan.pipelines
    )
    turns = replace(waiting, plan=waiting.plan.model_copy(update={"pipelines": pipelines}))
    plain = not any(stage.overlap for pipeline in waiting.plan.pipelines for stage in pipeline.stages)
    assert turns.weighed_s == pytest.approx(waiting.weighed_s / (IN_TURNS_PAYS if plain else 1))


def test_a_link_that_could_carry_gigabytes_while_a_message_is_on_its_way_is_planned_with() -> None:
    far = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e13, latency_s=0.01)
    (stage,) = asked(cluster(2, link=far), (1.0, 1.0), layers=2).plan.pipelines[0].stages
    assert stage.exchange.latency_bytes > 10**9
