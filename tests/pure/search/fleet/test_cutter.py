"""The best cut of layers over places against all cuts, and the plans of pipelines that are all alike."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.search.fleet.cutter import least_cut
from heterodyne.search.fleet.space import Space
from pure.search.fleet.small import drawn, search_of

SECONDS = st.floats(0.1, 4.0)


@given(st.data())
def test_no_cut_is_done_sooner(data: st.DataObject) -> None:
    """By the time that a pipeline under 1F1B takes at least; of stages, some do not fit."""
    layers, places = data.draw(st.integers(3, 7)), data.draw(st.integers(1, 3))
    micro_batches = data.draw(st.integers(1, 9))
    work = [data.draw(st.lists(SECONDS, min_size=layers, max_size=layers)) for _ in range(places)]
    most = [data.draw(st.integers(1, layers)) for _ in range(places)]
    sends = data.draw(st.lists(SECONDS, min_size=places - 1, max_size=places - 1))

    def cost(place: int, start: int, stop: int) -> float:
        return sum(work[place][start:stop]) if 0 < stop - start <= most[place] else float("inf")

    def seconds(points: tuple[int, ...]) -> float:
        own = [cost(place, *span) for place, span in enumerate(pairwise(points))]
        around = [sum(own[:place]) + 2 * sum(sends[:place]) for place in range(places)]
        return max(before + micro_batches * each for before, each in zip(around, own, strict=True))

    first = layers - places + 1
    costs = [
        np.array([[cost(place, place + a, place + 1 + b) for b in range(first)] for a in range(first)])
        for place in range(places)
    ]
    found = least_cut(costs, micro_batches, sends)
    every = [seconds((0, *cut, layers)) for cut in combinations(range(1, layers), places - 1)]
    assert (found is None) == (min(every) == float("inf"))
    if found is not None:
        assert (found[0], found[-1], len(found)) == (0, layers, places + 1)
        assert seconds(found) <= min(every) * (1 + 1e-9)


def test_a_space_may_ask_for_pipelines_that_are_all_alike() -> None:
    fleet, costs, samples = drawn(random.Random(3), devices=6, blocks=5)
    best = search_of(fleet, costs, samples, Space(max_templates=1)).run()
    whole = search_of(fleet, costs, samples).run()
    assert best is not None
    assert whole is not None
    assert len({group.template for group in best.plan.groups}) == 1
    assert whole.predicted.step_s <= best.predicted.step_s * 1.01
