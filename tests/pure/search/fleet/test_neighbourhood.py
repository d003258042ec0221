"""Every move of the local search leads to pipelines of the whole model on devices that there are."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from heterodyne.search.fleet.evaluated_plan import Mix, mix_of
from heterodyne.search.fleet.neighbourhood import Neighbourhood
from pure.search.fleet.small import drawn, search_of


@pytest.mark.parametrize("number", range(4))
def test_neighbours_hold_the_model_on_devices_that_there_are(number: int) -> None:
    fleet, costs, samples = drawn(random.Random(number), devices=6, ways=1 + number % 3)
    search = search_of(fleet, costs, samples)
    if search.run(lambda weighed: weighed.predicted.step_s) is None:
        return
    columns = list({template for mix in search.evaluated for template, _ in mix})
    near = Neighbourhood(
        predictor=search.predictor,
        cutter=search._cutter,
        columns=columns[:6],
        sizes=search.kinds.sizes,
        widths=search.kinds.widths,
        recompute=True,
    )
    room = {pool.name: pool.devices for pool in fleet.pools}
    # Those of the most pipelines and of the most kinds, from which the most moves lead away.
    starts = sorted(search.evaluated, key=lambda mix: (len(mix), max(len(t.stages) for t, _ in mix)))[-3:]
    for start in starts:
        every = set(near.from_mix(start, 1))
        assert len(every) > 1
        for mix in every:
            _require_whole(mix, len(costs.layers), room)


def test_stages_go_from_one_pipeline_to_another() -> None:
    """Of a pipeline of two devices and one of one, the neighbours have every division of the three between two pipelines."""
    for number in range(40):
        fleet, costs, samples = drawn(random.Random(number), devices=6)
        if len(fleet.pools) == 3:
            break
    search = search_of(fleet, costs, samples)
    size = search.kinds.sizes[0]
    a, b, c = ((pool.name, search.kinds.widths(pool.name, size)[0], 1) for pool in fleet.pools)
    near = Neighbourhood(
        predictor=search.predictor,
        cutter=search._cutter,
        columns=[],
        sizes=search.kinds.sizes,
        widths=search.kinds.widths,
        recompute=False,
    )
    pair, one = (next(search._cutter.cut(places, size, 4, 2, 1)) for places in ((a, b), (c,)))
    found = {
        frozenset(frozenset(template.devices) for template, _ in mix)
        for mix in near.from_mix(mix_of([(pair, 1), (one, 1)]), 1)
        if sum(count for _, count in mix) == 2
    }
    names = {pool.name for pool in fleet.pools}
    assert found >= {frozenset({frozenset({name}), frozenset(names - {name})}) for name in names}


def _require_whole(mix: Mix, layers: int, room: dict[str, int]) -> None:
    used: Counter[str] = Counter()
    for template, count in mix:
        assert count > 0
        assert (template.stages[0].start, template.stages[-1].stop) == (0, layers)
        assert all(a.stop == b.start and a.start < a.stop for a, b in pairwise(template.stages))
        used.update({pool: count * devices for pool, devices in template.devices.items()})
    assert all(devices <= room[pool] for pool, devices in used.items())
