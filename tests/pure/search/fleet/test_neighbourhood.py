"""Every move of the local search leads to pipelines of the whole model on devices that there are."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.neighbourhood import Neighbourhood
from heterodyne.search.fleet.plan import Mix, mix_of
from heterodyne.search.fleet.space import Space
from pure.search.fleet.small import drawn, search_of


@pytest.mark.parametrize("number", range(4))
def test_neighbours_hold_the_model_on_devices_that_there_are(number: int) -> None:
    fleet, costs, samples = drawn(random.Random(number), devices=6, ways=1 + number % 3)
    search = search_of(fleet, costs, samples)
    if search.run() is None:
        return
    columns = list({template for mix in search.pool.evaluated for template, _ in mix})
    near = Neighbourhood(kinds=search.kinds, cutter=search._cutter, columns=columns[:6], limits=search.limits)
    room = {pool.name: pool.devices for pool in fleet.pools}
    # Those of the most pipelines and of the most kinds, from which the most moves lead away.
    starts = sorted(search.pool.evaluated, key=lambda mix: (len(mix), max(len(t.stages) for t, _ in mix)))[-3:]
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
    search = search_of(fleet, costs, samples, Space(recompute=False))
    size = search.kinds.sizes[0]
    a, b, c = ((pool.name, search.kinds.widths(pool.name, size)[0], 1) for pool in fleet.pools)
    limits = Limits(
        room=np.array([pool.devices for pool in fleet.pools]), pools=tuple(pool.name for pool in fleet.pools)
    )
    near = Neighbourhood(kinds=search.kinds, cutter=search._cutter, columns=[], limits=limits)
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
