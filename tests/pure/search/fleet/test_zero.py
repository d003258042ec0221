"""State that is shared out: its memory in closed form, its exchanges, and the plans that it makes possible."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.errors import InfeasibleError
from heterodyne.search.fleet.kinds import kinds_of
from heterodyne.search.fleet.plan import ZERO_LEVELS, Mix, Template, TemplateStage
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.ring_network import RingNetwork
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.tables import EXCHANGED, Table
from pure.search.fleet.small import GIB, drawn, search_of, stage_of

PARAMETERS, GRADIENTS, STATES, KEPT, WORKSPACE = 100, 200, 600, 50, 7


def layer(experts: float = 0.0, scale: int = 1) -> LayerCost:
    return LayerCost(
        forward_s=1.0,
        backward_s=2.0,
        update_s=3.0,
        parameter_bytes=PARAMETERS * scale,
        gradient_bytes=GRADIENTS * scale,
        optimizer_bytes=STATES * scale,
        kept_bytes=KEPT,
        kept_bytes_recomputed=KEPT // 5,
        output_bytes=1,
        workspace_bytes=WORKSPACE,
        expert_bytes=round(experts * GRADIENTS * scale),
    )


@pytest.mark.parametrize("zero", ZERO_LEVELS)
@pytest.mark.parametrize("widths", [Widths(), Widths(2), Widths(data=4), Widths(2, 2, 2)])
@pytest.mark.parametrize("experts", [0.0, 0.75])
def test_memory_is_what_zero_says(zero: int, widths: Widths, experts: float) -> None:
    """Rajbhandari et al. (2020), figure 1: whole state over N from a level on, N the devices that hold the same parameters."""
    layers, held = 5, 3
    table = Table([layer(experts)] * layers, widths)
    for replicas in (1, 2, 8):
        own = table.memory(0, layers, recompute=False, held=held, replicas=replicas, zero=zero)
        part = (1 - experts) / (replicas * widths.copies) + experts / replicas
        shared = zero if replicas * widths.copies > 1 else 0
        assert own.parameters == pytest.approx(layers * PARAMETERS * (part if shared >= 3 else 1))
        assert own.gradients == pytest.approx(layers * GRADIENTS * (part if shared >= 2 else 1))
        assert own.optimizer == pytest.approx(layers * STATES * (part if shared >= 1 else 1))
        assert own.activations == held * layers * KEPT
        two_layers = {2: 2 * GRADIENTS, 3: 2 * (GRADIENTS + PARAMETERS)}.get(shared, 0)
        assert own.passing == WORKSPACE + two_layers


def test_the_layers_that_are_whole_at_a_time_are_neighbours() -> None:
    table = Table([layer(scale=scale) for scale in (5, 1, 4, 3)], Widths())
    many = 10**9
    for start, stop, scale in ((0, 1, 5), (1, 2, 1), (0, 2, 6), (0, 4, 7), (1, 3, 5)):
        own = table.memory(start, stop, recompute=False, held=0, replicas=many, zero=3)
        assert own.passing == WORKSPACE + scale * (GRADIENTS + PARAMETERS)


def test_a_ring_carries_what_its_devices_do_not_keep() -> None:
    """n - 1 parts of n of all that n devices hold alike; the node's link once for all parts of a layer (Patarasuk and Yuan, 2009)."""
    for widths in (Widths(), Widths(2), Widths(2, 2, 2)):
        table = Table([layer()] * 3, widths)
        for replicas in (1, 2, 8):
            n = replicas * widths.copies
            device, dense, experts = _carried(table, 0, 3, replicas)["gradients"]
            assert device == pytest.approx(3 * GRADIENTS * (n - 1) / n)
            assert dense == pytest.approx(3 * GRADIENTS * widths.tensor * (n - 1) / n)
            assert experts == 0
    device, dense, experts = _carried(Table([layer(1.0)] * 3, Widths(2, 1, 4)), 0, 3, 2)["gradients"]
    assert device == pytest.approx(3 * GRADIENTS / 2)
    assert experts == pytest.approx(8 * 3 * GRADIENTS / 2)
    assert dense == pytest.approx(0)


def _carried(table: Table, start: int, stop: int, replicas: int) -> dict[str, list[float]]:
    """Of a device, of one copy of what is no expert's, and of one set of the experts."""
    sent = table.sent(np.array([start]), np.array([stop])).carried(replicas)
    return {what: sent[:, number, 0].tolist() for number, what in enumerate(EXCHANGED)}


def _mixes(search: Search, chance: random.Random) -> Iterator[Mix]:
    """Random pipelines beside each other, as far as there are devices."""
    fleet, layers = search.fleet, len(search.tables.costs.layers)
    for _ in range(12):
        mix: dict[Template, int] = {}
        for _ in range(chance.choice([1, 1, 2])):
            size = chance.choice(search.kinds.sizes)
            stages = []
            kinds = kinds_of(fleet, search.tables, size, search.space)
            cuts = [0, *sorted(chance.sample(range(1, layers), chance.choice([0, 1, 2]))), layers]
            for start, stop in pairwise(cuts):
                stages.append(stage_of(chance.choice(kinds), start, stop, recompute=chance.random() < 0.3))
            template = Template(micro_batch=size, stages=tuple(stages))
            mix[template] = mix.get(template, 0) + chance.choice([1, 2, 3])
        yield tuple(mix.items())


@pytest.mark.parametrize("number", range(30))
def test_of_levels_that_fit_the_least_is_the_fastest(number: int) -> None:
    """With the same shares of the batch every level exchanges what the one below it does, and more."""
    chance = random.Random(300 + number)
    fleet, costs, samples = drawn(chance)
    pools = tuple(replace(pool, memory_bytes=10**15) for pool in fleet.pools)
    predictor = search_of(replace(fleet, pools=pools), costs, samples).predictor
    for mix in _mixes(Search(predictor=predictor, space=Space()), chance):
        for schedule, layout in product(("1F1B", "GPipe"), ("stages", "pipelines")):
            steps = [
                predictor.evaluate(mix, schedule=schedule, layout=layout, zero=(zero,))  # type: ignore[arg-type]
                for zero in ZERO_LEVELS
            ]
            best = predictor.evaluate(mix, schedule=schedule, layout=layout)  # type: ignore[arg-type]
            if best is None:
                assert steps == [None] * 4
                continue
            seconds = [step.predicted.step_s for step in steps if step is not None]
            assert len(seconds) == 4
            assert seconds[1] <= seconds[2] * (1 + 1e-9)
            assert seconds[2] <= seconds[3] * (1 + 1e-9)
            assert best.predicted.step_s == min(seconds)


@pytest.mark.parametrize("number", range(30))
def test_of_all_levels_the_best_is_weighed_whatever_the_memory(number: int) -> None:
    chance = random.Random(600 + number)
    fleet, costs, samples = drawn(chance)
    search = search_of(fleet, costs, samples)
    for mix in _mixes(search, chance):
        for schedule in ("1F1B", "GPipe"):
            alone = [search.predictor.evaluate(mix, schedule=schedule, zero=(z,)) for z in ZERO_LEVELS]  # type: ignore[arg-type]
            best = search.predictor.evaluate(mix, schedule=schedule)  # type: ignore[arg-type]
            least = min((w.predicted.step_s for w in alone if w is not None), default=None)
            assert (best is None) == (least is None)
            if best is not None and least is not None:
                assert best.predicted.step_s == pytest.approx(least)
                assert best.predicted.peak_share <= 1


@dataclass(frozen=True, kw_only=True)
class Large:
    """Alike layers with much state and little else: level by level they fit where they did not."""

    layers: tuple[str, ...] = ("block",) * 8

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        return (Widths(),)

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost:
        return LayerCost(
            forward_s=0.1 * micro_batch,
            backward_s=0.2 * micro_batch,
            update_s=0.01,
            parameter_bytes=GIB,
            gradient_bytes=2 * GIB,
            optimizer_bytes=6 * GIB,
            kept_bytes=GIB // 16 * micro_batch,
            kept_bytes_recomputed=GIB // 64 * micro_batch,
            output_bytes=GIB // 64,
        )


@pytest.mark.parametrize(("zero", "gib"), [(0, 76), (1, 32), (2, 21), (3, 16)])
def test_a_model_that_fits_from_a_level_on_is_planned_from_there(zero: int, gib: int) -> None:
    """State of 8, 16 and 48 GiB over 8 replicas: 72 GiB whole, then 30, 16 and 9, and what two layers take while they are whole."""
    pool = Pool(
        name="all",
        kind="a",
        nodes=1,
        devices_per_node=8,
        memory_bytes=gib * GIB,
        inside=Wire(bandwidth_bytes_per_s=1e11, latency_s=1e-6),
    )
    planner = FleetPlanner(fleet=Fleet(name="f", pools=(pool,)), costs=Large(), global_batch=64)
    alone = Space(max_stages=1)
    assert planner.plan(space=alone).best.plan.zero >= zero
    assert planner.plan(space=replace(alone, zero=(zero,))).best.plan.zero == zero
    if zero:
        with pytest.raises(InfeasibleError, match=rf"sharding .* over replicas \(ZeRO-{zero}\)"):
            planner.plan(space=replace(alone, zero=tuple(range(zero))))


def test_level_three_takes_the_longer_of_computing_and_exchange() -> None:
    """One stage on two devices of a slow link, by hand."""
    pool = Pool(
        name="all",
        kind="a",
        nodes=2,
        devices_per_node=1,
        memory_bytes=10**15,
        between=Wire(bandwidth_bytes_per_s=GIB, latency_s=0.0),
    )
    fleet = Fleet(name="f", pools=(pool,))
    predictor = search_of(fleet, Large(), 8).predictor  # type: ignore[arg-type]
    assert isinstance(predictor, Predictor)
    assert isinstance(predictor.network, RingNetwork)
    mix = ((Template(micro_batch=1, stages=(TemplateStage(pool="all", start=0, stop=8),)), 2),)
    by_zero = {zero: predictor.evaluate(mix, zero=(zero,)) for zero in ZERO_LEVELS}
    told = {zero: own.predicted for zero, own in by_zero.items() if own is not None}
    # Once round a ring of two is half of the bytes: 4 s for parameters, 8 s for gradients; passes of 0.8 and 1.6 s, four of each.
    assert told[0].pipelines_s == told[1].pipelines_s == pytest.approx(4 * 2.4)
    assert told[0].sync_s == pytest.approx(16 - 1.6)
    assert told[1].sync_s == pytest.approx(8 - 1.6 + 4 / 2)
    assert told[2].pipelines_s == pytest.approx(4 * (0.8 + 8))
    assert told[2].sync_s == pytest.approx(0.1 * 8 + 4 / 2)
    assert told[3].pipelines_s == pytest.approx(4 * (4 + 4 + 8))
    assert told[3].sync_s == pytest.approx(0.1 * 8)
    assert told[0].update_s == pytest.approx(0.08)
    assert told[1].update_s == told[3].update_s == pytest.approx(0.04)


@pytest.mark.parametrize("number", [29, 34, 35])
def test_what_this_library_runs_shards_state_over_pipelines_that_are_cut_alike_alone(number: int) -> None:
    """Elsewhere devices hold unlike boxes of a weight, and `plan.check_state` refuses the plan."""
    fleet, costs, samples = drawn(random.Random(number), devices=6, blocks=3, ways=3)
    search = search_of(fleet, costs, samples)
    search.space = search.space.that_runs()
    search.run()
    assert search.pool.evaluated
    for found in search.pool.evaluated.values():
        widths: dict[int, set[int]] = {}
        for group in found.plan.groups:
            for stage in group.template.stages:
                for each in range(stage.start, stage.stop):
                    widths.setdefault(each, set()).add(stage.widths.tensor)
        assert not found.plan.zero or all(len(of) == 1 for of in widths.values())
