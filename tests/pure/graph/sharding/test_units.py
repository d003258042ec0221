"""Where cuts may lie: in units that all ops on the way can bear, or nowhere."""

from __future__ import annotations

from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.graph import Ref, Size
from heterodyne.graph.sharding import PARTIAL, REPLICATE, Mode, Sharding, shard, sharded
from heterodyne.graph.sharding.rule import common_units
from pure.graph.sharding.by_hand import B, Made, price, problem

SIZES = st.tuples(st.booleans(), st.integers(1, 60)).map(lambda s: Size.per_sample(s[1]) if s[0] else Size.of(s[1]))


@given(SIZES, SIZES)
def test_common_units_divide_both_sizes_whatever_the_batch(a: Size, b: Size) -> None:
    units = common_units(a, b)
    assert units == common_units(b, a)
    for samples in range(1, 8):
        assert a(samples) % units(samples) == 0
        assert b(samples) % units(samples) == 0


@given(st.integers(1, 60), st.integers(1, 60))
def test_there_are_as_many_as_there_can_be(a: int, b: int) -> None:
    assert common_units(Size.of(a), Size.of(b)) == Size.of(gcd(a, b))
    assert common_units(Size.per_sample(a), Size.per_sample(b)) == Size.per_sample(gcd(a, b))


@pytest.mark.parametrize("odd", [Size((1, 1)), Size((0, 0, 2))])
def test_a_size_that_is_no_multiple_of_the_batch_is_one_piece(odd: Size) -> None:
    assert common_units(odd, Size.of(12)) == Size.of(1)


def attention(heads: int, few: int, size: int = 4) -> tuple[Made, Ref]:
    """Queries, keys and values of one tensor, and their mixture, brought back to its width."""
    made = Made()
    x = made.op("gelu", B, 8, 32, self=made.input(B, 8, 32))
    of_heads = []
    for count in (heads, few, few):
        flat = made.linear(x, 32, count * size)
        apart = made.op("view", B, 8, count, size, self=flat, size=())
        of_heads.append(made.op("transpose", B, count, 8, size, self=apart, dim0=1, dim1=2))
    query, key, value = of_heads
    mixed = made.op(
        "scaled_dot_product_attention", B, heads, 8, size, flops=1e6, query=query, key=key, value=value, dropout_p=0.0
    )
    back = made.op("transpose", B, 8, heads, size, self=mixed, dim0=1, dim1=2)
    flat = made.op("reshape", B, 8, heads * size, self=back, shape=())
    return made, made.linear(flat, heads * size, 32)


def sharding(made: Made, result: Ref, shares: tuple[int, ...]) -> Sharding:
    asked = problem(made.graph(), {result: REPLICATE}, costs=price(len(shares), flops_per_byte=1.0))
    return shard(asked, [shares], {})


def sizes_of(found: Sharding, name: str) -> tuple[int, ...]:
    stored = found.stored(name)
    assert stored is not None, f"{name} is whole"
    return stored[1]


def test_columns_that_become_heads_are_cut_between_groups_that_share_their_keys() -> None:
    made, result = attention(heads=8, few=2)
    found = sharding(made, result, (3, 2))
    assert [sizes_of(found, f"w{n}") for n in range(4)] == [(16, 16), (4, 4), (4, 4), (16, 16)]
    assert found.narrow == ()


def test_heads_without_groups_are_cut_one_by_one() -> None:
    made, result = attention(heads=8, few=8)
    found = sharding(made, result, (3, 2))
    assert [sizes_of(found, f"w{n}") for n in range(4)] == [(20, 12)] * 4


def test_too_few_groups_for_all_devices_are_told_and_not_cut() -> None:
    made, result = attention(heads=8, few=2)
    found = sharding(made, result, (1, 1, 1))
    told = {(entry.op.split("_")[0], entry.letter, entry.units) for entry in found.narrow}
    assert ("scaled", "h", 2) in told
    for family in found.families.of.values():
        assert not family.units.is_constant or family.units(1) >= 3


def test_a_device_without_a_share_asks_for_no_unit() -> None:
    made, result = attention(heads=8, few=2)
    found = sharding(made, result, (1, 0, 1))
    assert sizes_of(found, "w1") == (4, 0, 4)
    assert found.narrow == ()


def test_what_was_agreed_on_at_the_border_holds_inside() -> None:
    """Rows of several to a sample are cut between samples where what is sent is cut so."""
    made = Made()
    x = made.input(B, 6, 8)
    flat = made.op("view", B * 6, 8, self=x, size=())
    out = made.op("gelu", B * 6, 8, self=flat)
    asked = problem(made.graph(), {out: sharded(0)}, mode=Mode("replicate"))
    found = shard(asked, [(1, 1)], {(out, sharded(0)): Size.per_sample(1)})
    assert found.sizes(out, sharded(0), 3) == (12, 6)


def test_samples_may_be_fewer_than_devices() -> None:
    made = Made()
    x = made.input(B, 8)
    out = made.op("gelu", B, 8, self=x)
    loss = made.op("sum", self=out)
    asked = problem(made.graph(), {loss: PARTIAL}, mode=Mode("replicate"), costs=price(3))
    found = shard(asked, [(1, 1, 1)], {})
    assert (found.sizes(out, sharded(0), 2), found.narrow) == ((1, 0, 1), ())
