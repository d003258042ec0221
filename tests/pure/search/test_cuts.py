"""The cut is the best that there is: compared with all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError
from heterodyne.plan import MicroBatches
from heterodyne.search.cuts import best_cut
from heterodyne.search.drafts import Drafting
from heterodyne.search.points import points_of
from heterodyne.search.tables import Floats, Tables
from pure.build import cluster, graph, linear, profile

NUMBERS = st.integers(0, 6).map(float)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Floats], list[Floats], list[Floats]]:
    """Costs, lacks and borders of any kind: nothing is assumed about them but that they are not negative."""
    points, places = draw(st.integers(3, 6)), draw(st.integers(1, 3))

    def table(values: st.SearchStrategy[float], *shape: int) -> Floats:
        size = int(np.prod(shape))
        return np.array(draw(st.lists(values, min_size=size, max_size=size))).reshape(shape)

    lacks = st.sampled_from([0.0, 0.0, 0.0, 5.0, 9.0])
    return (
        [table(NUMBERS, points, points) for _ in range(places)],
        [table(lacks, points, points) for _ in range(places)],
        [table(NUMBERS, points) for _ in range(places - 1)],
    )


def all_cuts(points: int, places: int) -> list[tuple[int, ...]]:
    return [(0, *inner, points - 1) for inner in combinations(range(1, points - 1), places - 1)]


def worth(cut: tuple[int, ...], step: list[Floats], border: list[Floats]) -> tuple[float, float]:
    stages = [own[a, b] for own, (a, b) in zip(step, pairwise(cut), strict=True)]
    sent = [own[at] for own, at in zip(border, cut[1:], strict=False)]
    return max([*stages, *sent]), sum(stages)


@given(problems())
@settings(max_examples=200)
def test_no_cut_has_a_faster_slowest_stage(problem: tuple[list[Floats], list[Floats], list[Floats]]) -> None:
    step, lack, border = problem
    names = [f"place {n}" for n in range(len(step))]
    cuts = all_cuts(len(step[0]), len(step))
    fitting = [cut for cut in cuts if all(own[a, b] == 0 for own, (a, b) in zip(lack, pairwise(cut), strict=True))]
    if not fitting:
        with pytest.raises(InfeasibleError) as caught:
            best_cut(step, lack, border, names)
        least = [max(own[a, b] for own, (a, b) in zip(lack, pairwise(cut), strict=True)) for cut in cuts]
        if cuts:
            assert max(caught.value.shortfalls.values()) == min(least)
            assert all(name in str(caught.value) for name in caught.value.shortfalls)
        return
    found = best_cut(step, lack, border, names)
    assert found.points in fitting
    best = min(worth(cut, step, border) for cut in fitting)
    assert (found.longest_s, found.total_s) == best


@given(problems(), st.floats(0.01, 1))
@settings(max_examples=100)
def test_filling_is_weighed_against_the_slowest_stage(
    problem: tuple[list[Floats], list[Floats], list[Floats]], fill: float
) -> None:
    step, lack, border = problem
    none = [np.zeros_like(own) for own in lack]
    if len(step[0]) - 1 < len(step):
        return
    names = ["a place"] * len(step)
    found = best_cut(step, none, border, names, fill=fill)
    assert found.estimate_s(fill) <= best_cut(step, none, border, names).estimate_s(fill)
    assert (found.longest_s, found.total_s) == worth(found.points, step, border)


def test_more_stages_than_places_to_cut_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="take fewer stages"):
        best_cut([np.zeros((3, 3))] * 3, [np.zeros((3, 3))] * 3, [np.zeros(3)] * 2, ["a", "b", "c"])


@pytest.mark.parametrize("memory", [(40, 20, 10), (10, 40, 20), (25, 25, 25)])
def test_the_roomiest_cut_leaves_the_fullest_device_most_memory(memory: tuple[int, ...]) -> None:
    """Compared with all cuts, however slow the devices with memory are."""
    model = graph(10, width=128, saved=10)
    machines = cluster(3, memory=[2**29 + size * 2**18 for size in memory])
    costs = CostModel(
        graph=model, cluster=machines, profile=profile(model, machines, [linear(n) for n in (9.0, 1.0, 3.0)])
    )
    drafting = Drafting(model=costs, tables=Tables(model=costs, points=points_of(model)))
    line, sizes = tuple(device.id for device in machines.devices), MicroBatches((2, 2))
    lacks, draft = drafting.roomiest(line, sizes)
    over = [drafting.tables.over(device, 2, most) for device, most in zip(line, (2, 2, 1), strict=True)]

    def worst(points: tuple[int, ...]) -> float:
        return max(float(own[a, b]) for own, (a, b) in zip(over, pairwise(points), strict=True))

    assert worst(draft.points) == pytest.approx(lacks)
    assert lacks == pytest.approx(min(map(worst, all_cuts(len(drafting.points), 3))))
