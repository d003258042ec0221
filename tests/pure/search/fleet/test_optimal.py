"""The search against every plan there is, and its bounds against every plan that it weighed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster.fleet import Fleet
from heterodyne.search.fleet.plan import INTERLEAVED, Candidate
from heterodyne.search.fleet.search import Search
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.written import fleet_timeline
from pure.search.fleet.exhaustive import Exhaustive
from pure.search.fleet.small import Drawn, drawn, search_of


def _step_s(weighed: Candidate) -> float:
    return weighed.predicted.step_s


def test_it_is_the_best_plan_there_is_nearly_always_and_never_far_from_it() -> None:
    longer = []
    for devices, blocks in ((3, 5), (4, 3), (5, 2)):
        for number in range(6):
            fleet, costs, samples = drawn(random.Random(1000 * devices + number), devices=devices, blocks=blocks)
            search = search_of(fleet, costs, samples, waits=number % 3 == 2)
            best = search.run()
            known_s = float("inf") if best is None else _step_s(best)
            other = search_of(fleet, costs, samples, waits=number % 3 == 2)
            shortest_s = Exhaustive(search=other, known_s=known_s).shortest_s()
            assert search.pool.bound_s <= shortest_s * (1 + 1e-9)
            if best is None:
                assert shortest_s == float("inf")
            else:
                longer.append(known_s / shortest_s - 1)
    assert max(longer) <= 0.01
    assert sum(value <= 1e-9 for value in longer) >= 0.95 * len(longer)


@settings(max_examples=10)
@given(number=st.integers(0, 2**32))
def test_every_plan_that_is_weighed_keeps_memory_devices_and_batch_and_beats_no_bound(number: int) -> None:
    chance = random.Random(number)
    fleet, costs, samples = drawn(chance, devices=chance.randint(2, 6), blocks=6, ways=1 + number % 3)
    search = search_of(fleet, costs, samples, waits=number % 2 == 1)
    search.run()
    for mix, weighed in search.pool.evaluated.items():
        _require_possible(weighed, fleet, costs, samples)
        _require_full(search, weighed)
        played_s = _step_s(weighed)
        assert search.pool.bound_s <= played_s * (1 + 1e-9)
        sync_and_update_s = search.predictor.least_sync_and_update_s(mix, search.space.layouts, search.space.zero)
        assert sync_and_update_s >= 0
        assert search.predictor.bound_s(mix) + sync_and_update_s <= played_s * (1 + 1e-9)
        assert search.predictor.bound_at_most(mix, played_s - sync_and_update_s * (1 - 1e-9))
        if weighed.plan.schedule in ("1F1B", "GPipe"):
            assert search.predictor.bound_s(mix, split=False) <= played_s * (1 + 1e-9)
            assert search.predictor.bound_at_most(mix, played_s, split=False)


def _require_full(search: Search, weighed: Candidate) -> None:
    """Of the micro-batches for which there is said to be room, one more would not fit."""
    room, plan = search.predictor.pipeline_memory, weighed.plan
    for template in (group.template for group in plan.groups if group.template.chunks == 1):
        for schedule in ("1F1B", "GPipe", "ZBH1", "ZBH2"):
            most = room.most_micro_batches(template, schedule, plan.pipelines, plan.zero)
            assert not most or room.fits(template, most, schedule, plan.pipelines, plan.zero)
            if most < room.whole(template):
                assert not room.fits(template, most + 1, schedule, plan.pipelines, plan.zero)


def _require_possible(weighed: Candidate, fleet: Fleet, costs: Drawn, samples: int) -> None:
    plan = weighed.plan
    assert all(count <= fleet.pool(pool).devices for pool, count in plan.devices.items())
    assert weighed.predicted.peak_share <= 1
    assert sum(group.capacity for group in plan.groups) >= samples
    for group in plan.groups:
        assert group.num_microbatches >= 1
        assert group.template.stages[0].start == 0
        assert group.template.stages[-1].stop == len(costs.layers)
        for a, b in zip(group.template.stages, group.template.stages[1:], strict=False):
            assert a.start < a.stop == b.start
        assert (plan.schedule in INTERLEAVED) <= any(g.template.chunks > 1 for g in plan.groups)
        assert group.template.chunks == 1 or plan.schedule in INTERLEAVED


def test_a_wider_choice_of_schedules_is_never_slower_and_helps_where_pipelines_wait() -> None:
    """Few micro-batches on stages that one device cannot hold: less bubble, or less memory, is all that a schedule can bring."""
    faster = 0
    for number in range(4):
        chance = random.Random(300 + number)
        fleet, costs, samples = drawn(chance, devices=4, blocks=6)
        found = [
            search_of(fleet, costs, samples, Space(schedules=schedules)).run()  # type: ignore[arg-type]
            for schedules in (("1F1B",), ("1F1B", "ZBH1", "ZBH2"), Space().schedules)
        ]
        if None in found:
            continue
        plain, split, every = (_step_s(weighed) for weighed in found if weighed is not None)
        assert split <= plain * (1 + 1e-9)
        assert every <= plain * (1 + 1e-9)
        faster += every < plain * (1 - 1e-6)
    assert faster


def test_timelines_play_what_was_predicted() -> None:
    seen = set()
    for number in range(5):
        fleet, costs, samples = drawn(random.Random(400 + number), devices=4, blocks=6)
        search = search_of(fleet, costs, samples)
        search.run()
        for weighed in list(search.pool.evaluated.values())[-8:]:
            told = fleet_timeline(search.predictor, weighed)
            own = weighed.predicted
            ends = [e.end_s for e in told.events if e.kind not in ("REDUCE_GRAD", "STEP")]
            assert max(ends) == pytest.approx(own.pipelines_s)
            assert len(told.devices) == sum(group.template.places for group in weighed.plan.groups)
            seen.add(weighed.plan.schedule)
    assert len(seen) >= 4
