"""What a person asks of a fleet: the best plan for a goal, within a budget, in time, and why nothing else is better."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import numpy as np
import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.errors import ClusterError, InfeasibleError
from heterodyne.search.explain import ratio_in_words
from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.evaluator import Watch
from heterodyne.search.fleet.explain import (
    host_exchange_in_words,
    step_in_words,
    unjoined_in_words,
    why_more,
)
from heterodyne.search.fleet.families import with_families
from heterodyne.search.fleet.fleet_wires import Wires
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import Template, TemplateGroup, TemplatePlan, TemplateStage
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.ring_network import RingNetwork
from heterodyne.search.fleet.space import Space
from heterodyne.units import format_seconds
from pure.search.fleet.small import GIB, Drawn, drawn, search_of


def _pool(name: str, nodes: int, *, speed_gbps: float = 10.0, memory: float = 24, usd: float = 2.0) -> Pool:
    return Pool(
        name=name,
        kind=name,
        nodes=nodes,
        devices_per_node=2,
        memory_bytes=int(memory * GIB),
        inside=Wire(bandwidth_bytes_per_s=20 * speed_gbps * 1e9, latency_s=0.0),
        between=Wire(bandwidth_bytes_per_s=speed_gbps * 1e9, latency_s=0.0),
        usd_per_device_hour=usd,
        watts_per_device=300.0,
    )


def _costs(**changed: object) -> Drawn:
    costs = Drawn(
        layers=("embedding", *["block"] * 8, "head"),
        speed={"fast": 4.0, "slow": 1.0},
        fixed_s=0.05,
        lost=0.7,
        backward=2.0,
        head=0.5,
        kept=0.1,
        weights=0.1,
    )
    return replace(costs, **changed)  # type: ignore[arg-type]


def _planner(*pools: Pool, costs: Drawn | None = None, samples: int = 64) -> FleetPlanner:
    return FleetPlanner(fleet=Fleet(name="f", pools=pools), costs=costs or _costs(), global_batch=samples)


def test_the_same_input_gives_the_same_plan() -> None:
    plans = {_planner(_pool("fast", 2), _pool("slow", 3)).plan().best.plan for _ in range(3)}
    assert len(plans) == 1


def test_devices_that_only_slow_it_down_are_left_out() -> None:
    slow = _pool("slow", 1, speed_gbps=0.01)
    planned = _planner(_pool("fast", 2), slow, costs=_costs(speed={"fast": 4.0, "slow": 0.02})).plan()
    assert "slow" not in planned.best.plan.devices


def test_unlike_devices_get_unlike_shares() -> None:
    costs = _costs(speed={"fast": 3.0, "slow": 1.0}, fixed_s=0.0, weights=0.001, kept=0.001)
    plan = (
        _planner(_pool("fast", 1), _pool("slow", 1), costs=costs).plan(space=Space(max_stages=1, max_width=1)).best.plan
    )
    done: dict[str, int] = {}
    for group in plan.groups:
        pool = group.template.stages[0].pool
        done[pool] = done.get(pool, 0) + group.capacity
    assert done["fast"] / done["slow"] == pytest.approx(3.0, rel=0.1)


def test_a_budget_is_kept_and_a_smaller_one_is_no_faster() -> None:
    planner = _planner(_pool("fast", 2, usd=4.0), _pool("slow", 2, usd=0.5))
    steps = []
    for budget in (20.0, 9.0, 4.5, 1.0):
        best = planner.plan(Objective(usd_per_hour=budget)).best.predicted
        assert best.usd_per_hour is not None
        assert best.usd_per_hour <= budget * (1 + 1e-9)
        steps.append(best.step_s)
    assert steps == sorted(steps)
    with pytest.raises(InfeasibleError):
        planner.plan(Objective(usd_per_hour=0.1))


def test_each_goal_is_no_worse_in_its_own_measure_than_the_others() -> None:
    planner = _planner(_pool("fast", 1, usd=4.0), _pool("slow", 2, usd=0.9))
    by_goal = {g: planner.plan(Objective(goal=g)).best.predicted for g in ("throughput", "money", "energy", "memory")}
    for own in by_goal.values():
        assert by_goal["throughput"].step_s <= own.step_s * (1 + 1e-9)
        assert (by_goal["money"].usd or 0) <= (own.usd or 0) * 1.001
        assert (by_goal["energy"].joules or 0) <= (own.joules or 0) * 1.001
        assert by_goal["memory"].peak_bytes <= own.peak_bytes * 1.001


def test_least_memory_is_told_as_a_part_of_the_devices_as_they_are() -> None:
    """Also where some devices have no room at all."""
    fast = _pool("fast", 4)
    found = _planner(fast, replace(_pool("slow", 2), memory_bytes=1)).plan(Objective(goal="memory")).best.predicted
    assert found.peak_share == pytest.approx(found.fullest_bytes / fast.memory_bytes, rel=1e-3)


def test_nothing_on_the_frontier_is_beaten_by_another() -> None:
    planned = _planner(_pool("fast", 1, usd=4.0), _pool("slow", 2, usd=0.9)).plan(frontier=True)
    figures = [(w.predicted.step_s, w.predicted.usd or 0.0, w.predicted.devices) for w in planned.frontier]
    assert planned.best in planned.frontier
    for a in figures:
        assert not any(a != b and all(x <= y for x, y in zip(b, a, strict=True)) for b in figures)


def test_a_deadline_in_the_past_is_said() -> None:
    planner = _planner(_pool("fast", 2))
    with pytest.raises(InfeasibleError, match="more time"):
        planner.plan(watch=Watch(deadline_s=monotonic() - 1.0))
    planned = planner.plan(watch=Watch(deadline_s=monotonic() + 600.0))
    assert not planned.stopped


def test_a_search_that_is_asked_to_stop_gives_the_best_so_far_and_has_told_of_it() -> None:
    def planner() -> FleetPlanner:
        return _planner(_pool("fast", 4), _pool("slow", 4))

    whole = planner().plan()
    for looks in (40, 200, 1000):
        left = iter(range(looks))
        told: list[float] = []
        watch = Watch(
            asked=lambda left=left: next(left, None) is None,  # type: ignore[misc]
            told=lambda weighed, told=told: told.append(weighed.predicted.step_s),  # type: ignore[misc]
            every_s=0.0,
        )
        planned = planner().plan(watch=watch)
        assert planned.best.predicted.step_s >= whole.best.predicted.step_s
        assert planned.stopped or planned.best == whole.best
        assert told == sorted(told, reverse=True)
        assert told
        assert planned.best.predicted.step_s <= told[-1]


def test_twice_the_devices_do_twice_the_batch_in_the_same_time() -> None:
    """Every pipeline twice: only rings are a little longer. Of 640 devices those of one kind alone have memory for long pipelines only."""
    costs = _costs(layers=("embedding", *["block"] * 30, "head"), weights=1.0, kept=0.3)
    once, twice = (
        _planner(
            _pool("fast", 50 * times, memory=12), _pool("slow", 110 * times, memory=8), costs=costs, samples=256 * times
        ).plan()
        for times in (1, 2)
    )
    assert twice.best.predicted.step_s <= 1.01 * once.best.predicted.step_s


def test_no_step_is_bounded_to_less_than_one_sample_takes_through_all_layers() -> None:
    """However many devices there are: only for the gradients of weights nothing waits, half of a backward here."""
    fleet, costs = Fleet(name="f", pools=(_pool("fast", 300),)), _costs(handed=0.0)
    own = [costs.cost("fast", layer, widths, 1) for widths in costs.widths("fast") for layer in costs.layers]
    layers = [cost.forward_s + cost.backward_s / 2 for cost in own if cost is not None]
    waits = (sum(layers[: len(costs.layers)]), sum(layers[len(costs.layers) :]))
    planned = FleetPlanner(fleet=fleet, costs=costs, global_batch=1).plan(
        space=Space(schedules=("ZBH1", "Interleaved1F1B"))
    )
    assert 0.99 * min(waits) <= planned.bound_s <= planned.best.predicted.step_s


def test_a_smaller_space_is_never_faster() -> None:
    for number in range(2):
        fleet, costs, samples = drawn(random.Random(number), devices=4, blocks=4)
        planner = FleetPlanner(fleet=fleet, costs=costs, global_batch=samples)
        try:
            planned = planner.plan()
        except InfeasibleError:
            continue
        for family in with_families(planner, planned, Space())[1]:
            assert (family.best is None) == bool(family.why_not)
            if family.best is not None:
                assert family.best.predicted.step_s >= planned.best.predicted.step_s * 0.99


def test_no_kind_of_plans_is_slower_than_a_plan_of_it_that_another_search_has_found() -> None:
    planner = _planner(_pool("fast", 3), _pool("slow", 3), costs=_costs(ways=3, fixed_s=0.0), samples=7)
    planned = planner.plan()
    found = {family.name: family.best for family in with_families(planner, planned, Space())[1]}
    of_kind: dict[str, Callable[[Template], bool]] = {
        "no tensor parallelism": lambda template: all(stage.widths.tensor == 1 for stage in template.stages),
        "no context parallelism": lambda template: all(stage.widths.context == 1 for stage in template.stages),
        "no stages that share a micro-batch": lambda template: all(stage.widths.data == 1 for stage in template.stages),
        "no recompute": lambda template: not any(stage.recompute for stage in template.stages),
        "no pipeline over several pools": lambda template: len(template.devices) == 1,
    }
    for name, holds in of_kind.items():
        best = found[name]
        assert best is not None
        for other in (planned.best, *planned.runners_up, *filter(None, found.values())):
            if all(holds(group.template) for group in other.plan.groups):
                assert best.predicted.step_s <= other.predicted.step_s, name


def test_what_cannot_be_says_what_it_lacks_and_what_would_help() -> None:
    costs = _costs(kept=3.0, weights=0.05)
    planner = _planner(_pool("fast", 1, memory=8), costs=costs)
    with pytest.raises(InfeasibleError, match=r"needs .* on fast .*in stage 0 of 1.*activations.*try recompute"):
        planner.plan(space=Space(recompute=False, max_stages=1, micro_batches=(1,)))
    with pytest.raises(InfeasibleError, match=r"more devices, or devices with more memory|more stages"):
        _planner(_pool("fast", 1, memory=0.1), costs=costs).plan()
    with pytest.raises(InfeasibleError, match="not known"):
        _planner(_pool("other", 1), costs=costs).plan()


def test_under_limits_that_allow_no_pipeline_nothing_is_paired() -> None:
    """As in a search for less money, when the budget falls below what one pipeline costs."""
    search = _planner(_pool("fast", 2), _pool("slow", 2)).search(Space())
    assert search._mixes.pairs([], Limits(room=np.array([0, 0]), pools=("fast", "slow")), 1.0) == []
    assert search._played([()], None, ("1F1B",)) is None, "no pipeline at all is no plan"


def test_a_goal_that_needs_prices_asks_for_them() -> None:
    pool = replace(_pool("fast", 1), usd_per_device_hour=None)
    with pytest.raises(ClusterError, match="a price of every pool; not stated for fast"):
        _planner(pool).plan(Objective(goal="money"))


def test_words_tell_the_step_and_the_runners_up() -> None:
    planner = _planner(_pool("fast", 1), _pool("slow", 1))
    planned = planner.plan()
    assert format_seconds(planned.best.predicted.step_s) in step_in_words(planned)
    for other in planned.runners_up:
        ratio = other.predicted.step_s / planned.best.predicted.step_s
        assert why_more(other, planned.best, planned.objective).startswith(ratio_in_words(ratio))
    assert why_more(planned.best, planned.best, planned.objective) == "the best plan is one of these"


def test_the_best_of_what_was_found_is_the_plan_whichever_search_has_found_it() -> None:
    full = _planner(_pool("fast", 1), _pool("slow", 1)).plan()
    worse = replace(full, evaluated={}, others=full.runners_up)
    assert worse.best == full.runners_up[0]
    mended = replace(worse, others=(*worse.others, full.best))
    assert mended.best == full.best
    assert mended.best in mended.frontier
    assert mended.runners_up == full.runners_up
    picky = replace(mended, accepts=lambda plan: plan == worse.best.plan)
    assert (picky.best, picky.refused) == (worse.best, full.best)
    assert replace(mended, accepts=lambda plan: False).best == full.best


def test_the_fullest_device_is_told_by_its_own_bytes() -> None:
    """A device with little memory is the fullest, and another one holds more."""
    small, large = _pool("slow", 1, memory=3), _pool("fast", 1, memory=60)
    predictor = _planner(small, large).search(Space()).predictor
    stages = (
        TemplateStage(pool="slow", start=0, stop=3),
        TemplateStage(pool="fast", start=3, stop=10),
    )
    weighed = predictor.evaluate(((Template(micro_batch=1, stages=stages), 1),))
    assert weighed is not None
    own = weighed.predicted
    assert own.peak_bytes > own.fullest_bytes == pytest.approx(own.peak_share * small.memory_bytes)


def test_devices_without_a_library_in_common_meet_over_sockets_and_it_is_said() -> None:
    wire = Wire(bandwidth_bytes_per_s=10e9, latency_s=1e-5)
    pools = tuple(
        Pool(name=name, kind=kind, nodes=1, devices_per_node=1, memory_bytes=2**36, between=wire)
        for name, kind in (
            ("green", "H100-SXM-80GB"),
            ("older", "A100-SXM-80GB"),
            ("red", "MI300X"),
            ("new", "made-up"),
        )
    )
    fleet = Fleet(name="f", pools=pools, links={("all", "all"): wire})
    wires = Wires(fleet)

    def said(*names: str) -> str:
        groups = (Template(micro_batch=1, stages=(TemplateStage(pool=name, start=0, stop=10),)) for name in names)
        alone = tuple(TemplateGroup(template=template, replicas=1, num_microbatches=1) for template in groups)
        return host_exchange_in_words(fleet, TemplatePlan(groups=alone, global_batch=4))

    for one, other, together in (("green", "older", True), ("green", "new", True), ("green", "red", False)):
        found = wires.between(one, other)
        assert found is not None
        assert (found.bandwidth_bytes_per_s == wire.bandwidth_bytes_per_s) == together
        assert (said(one, other) == "") == together
    assert said("green", "red").startswith("H100-SXM-80GB (NCCL) and MI300X (RCCL) exchange tensors")


def test_what_no_known_link_joins_is_told_where_devices_are_left_out() -> None:
    joined = _pool("fast", 2)
    apart = replace(_pool("slow", 2), between=None, place=("west",))

    def said(*pools: Pool) -> str:
        planned = _planner(*pools).plan()
        return unjoined_in_words(Fleet(name="f", pools=pools), planned.best.plan)

    assert said(joined) == ""
    assert "between fast and slow, between the nodes of slow, so none" in said(joined, apart)
    assert said(joined, replace(apart, nodes=1)).count("between") == 1


def test_more_devices_of_the_same_kinds_are_no_slower() -> None:
    few = search_of(Fleet(name="f", pools=(_pool("fast", 8), _pool("slow", 8))), _costs(), 64, Space(max_stages=6))
    many = search_of(Fleet(name="f", pools=(_pool("fast", 80), _pool("slow", 80))), _costs(), 64, Space(max_stages=6))
    one, other = few.run(), many.run()
    assert one is not None
    assert other is not None
    assert other.predicted.step_s <= one.predicted.step_s * (1 + 1e-9)


def test_gradients_go_round_a_ring_that_enters_every_node_once() -> None:
    fleet = Fleet(name="f", pools=(_pool("fast", 4),))
    search = search_of(fleet, _costs(), 64)
    template = Template(micro_batch=1, stages=(TemplateStage(pool="fast", start=0, stop=10),))
    sums = {template: search.predictor.stage_tables.sums(template)}
    size = sums[template].tables[0].reduced_bytes(0, 10)
    for pipelines, bandwidth in ((1, 1.0), (2, 200e9), (8, 10e9)):
        own = RingNetwork(fleet).exchanges([(template, pipelines)], sums, "stages").of[template]
        once_s = (pipelines - 1) / pipelines * size / bandwidth
        assert own.scattered_s == own.scattered_layers_s == pytest.approx(once_s)
        assert own.reduced_s == pytest.approx(2 * once_s)
        assert own.updated_s == own.gathered_layers_s == pytest.approx(once_s)
