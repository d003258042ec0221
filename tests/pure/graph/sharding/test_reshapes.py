"""Reshapes: the dims that hold the same elements before and after, and the cuts that are cuts on both sides."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.graph import Size
from heterodyne.graph.sharding.rules import rule_of
from heterodyne.graph.sharding.rules.shapes import regrouped
from pure.graph.sharding.by_hand import Made

SAMPLES = 3
Shape = tuple[Size, ...]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two shapes of the same elements in the same order: factors, of which one may be the batch, put together in two ways."""
    factors = [Size.of(f) for f in draw(st.lists(st.sampled_from((2, 2, 3, 4, 5)), min_size=1, max_size=5))]
    if draw(st.booleans()):
        factors.insert(draw(st.integers(0, len(factors))), Size.per_sample(1))

    def put_together() -> Shape:
        dims = [factors[0]]
        for factor in factors[1:]:
            if draw(st.booleans()):
                dims.append(factor)
            else:
                dims[-1] = dims[-1] * factor
        for _ in range(draw(st.integers(0, 2))):
            dims.insert(draw(st.integers(0, len(dims))), Size.of(1))
        return tuple(dims)

    return put_together(), put_together()


def elements(dims: Shape) -> tuple[int, ...]:
    return tuple(int(size(SAMPLES)) for size in dims)


@given(shapes())
def test_runs_are_all_dims_in_order_with_the_same_elements(pair: tuple[Shape, Shape]) -> None:
    before, after = pair
    runs = list(regrouped(before, after))
    assert [dim for dims, _ in runs for dim in dims] == list(range(len(before)))
    assert [dim for _, dims in runs for dim in dims] == list(range(len(after)))
    for dims, others in runs:
        left, right = Size.of(1), Size.of(1)
        for dim in dims:
            left = left * before[dim]
        for dim in others:
            right = right * after[dim]
        assert left == right


@given(shapes())
def test_no_run_could_be_two(pair: tuple[Shape, Shape]) -> None:
    before, after = map(elements, pair)
    for dims, others in regrouped(*pair):
        inner = product(range(dims.start + 1, dims.stop), range(others.start + 1, others.stop))
        for i, j in inner:
            ahead = prod(before[dims.start : i]), prod(after[others.start : j])
            behind = prod(before[i : dims.stop])
            assert ahead[0] != ahead[1] or 1 in (*ahead, behind), (dims, others, i, j)


@given(shapes())
def test_slices_of_what_is_reshaped_are_reshaped_slices(pair: tuple[Shape, Shape]) -> None:
    before, after = pair
    made = Made()
    x = made.input(*before)
    graph_of = made.op("view", *after, self=x, size=()).name
    graph = made.graph()
    rule = rule_of(graph.op_by_name[graph_of], graph)
    whole = np.arange(prod(elements(before))).reshape(elements(before))
    result = whole.reshape(elements(after))
    for letter in rule.letters:
        units = int(rule.units[letter](SAMPLES))
        source, made_of = rule.operands[0].index(letter), rule.outputs[0].index(letter)
        slices = np.split(whole, units, source)
        expected = np.split(result, units, made_of)
        for part, of_result in zip(slices, expected, strict=True):
            assert (part.reshape(of_result.shape) == of_result).all()
