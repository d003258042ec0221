"""Boxes of a tensor: those between all cuts are a partition, and each is held by whoever holds all of it."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from heterodyne.plan.boxes import Box, Slice, covers, inside, numel, refined

Place = tuple[int, ...]


def places(box: Box, shape: tuple[int, ...]) -> set[Place]:
    """The elements of a box, one by one."""
    ranges = [range(size) for size in shape]
    for cut in box:
        ranges[cut.dim] = range(cut.first, cut.stop)
    return set(product(*ranges))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], within: Box = ()) -> Box:
    bounds = {cut.dim: (cut.first, cut.stop) for cut in within}
    made = []
    for dim, size in enumerate(shape):
        low, high = bounds.get(dim, (0, size))
        if dim in bounds or draw(st.booleans()):
            first = draw(st.integers(low, high))
            made.append(Slice(dim, first, draw(st.integers(first, high))))
    return tuple(made)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(st.data(), SHAPES)
def test_boxes_between_all_cuts_are_a_partition_of_what_is_held(data: st.DataObject, shape: tuple[int, ...]) -> None:
    holders = {name: data.draw(boxes(shape)) for name in "abcd"[: data.draw(st.integers(1, 4))]}
    found = refined(holders, shape)
    of: dict[Place, tuple[str, ...]] = {}
    for box, held_by in found:
        for place in places(box, shape):
            assert place not in of, "two boxes have an element in common"
            of[place] = held_by
    for place in product(*map(range, shape)):
        expected = tuple(name for name, box in holders.items() if place in places(box, shape))
        assert of.get(place, ()) == expected


@given(st.data(), SHAPES)
def test_no_box_is_empty_or_of_nobody(data: st.DataObject, shape: tuple[int, ...]) -> None:
    holders = {name: data.draw(boxes(shape)) for name in "abc"}
    for box, held_by in refined(holders, shape):
        assert places(box, shape)
        assert held_by


@given(st.data(), SHAPES)
def test_elements_are_counted(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box = data.draw(boxes(shape))
    assert numel(box, shape) == len(places(box, shape))


@given(st.data(), SHAPES)
def test_a_box_covers_another_if_it_has_all_of_its_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer, inner = data.draw(boxes(shape)), data.draw(boxes(shape))
    if places(inner, shape):
        assert covers(outer, inner, shape) == (places(inner, shape) <= places(outer, shape))


@given(st.data(), SHAPES)
def test_a_box_inside_of_another_is_counted_from_where_that_begins(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = data.draw(boxes(shape))
    inner = data.draw(boxes(shape, outer))
    begins = [next((cut.first for cut in outer if cut.dim == dim), 0) for dim in range(len(shape))]
    of_outer = tuple(
        next((cut.stop - cut.first for cut in outer if cut.dim == dim), size) for dim, size in enumerate(shape)
    )
    moved = {
        tuple(a + b for a, b in zip(place, begins, strict=True)) for place in places(inside(outer, inner), of_outer)
    }
    assert moved == places(inner, shape)


@given(SHAPES)
def test_who_holds_all_alike_shares_one_box(shape: tuple[int, ...]) -> None:
    assert refined({"a": (), "b": ()}, shape) == [((), ("a", "b"))]


def test_rows_here_and_columns_there_meet_in_four_boxes() -> None:
    rows = {"a": (Slice(0, 0, 3),), "b": (Slice(0, 3, 4),)}
    columns = {"c": (Slice(1, 0, 2),), "d": (Slice(1, 2, 6),)}
    found = refined(rows | columns, (4, 6))
    assert [held_by for _, held_by in found] == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]
    assert [numel(box, (4, 6)) for box, _ in found] == [6, 12, 2, 4]
