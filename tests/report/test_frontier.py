"""The picture of a frontier: one staircase down to the right, and labels that do not lie on each other."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.report.frontier import labelled, stairs

POINTS = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=1, max_size=30)


@given(POINTS)
def test_the_line_only_goes_down_and_nothing_is_below_it(points: list[tuple[float, float]]) -> None:
    steps = [points[number] for number in stairs(points)]
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(steps))
    assert all(any(x <= point[0] and y <= point[1] for x, y in steps) for point in points)


@given(POINTS)
def test_the_ends_are_labelled_and_no_two_labels_meet(points: list[tuple[float, float]]) -> None:
    steps = [points[number] for number in stairs(points)]
    shown = labelled(steps, (100.0, 100.0))
    assert shown[0] == 0
    assert all(
        abs(steps[a][0] - steps[b][0]) >= 18 or abs(steps[a][1] - steps[b][1]) >= 9 for a, b in combinations(shown, 2)
    )
