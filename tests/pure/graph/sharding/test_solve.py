"""The search for how ops run: it finds what people have found for the models that they know, and decides alike everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.errors import PlanError
from heterodyne.graph import ModelGraph, Ref
from heterodyne.graph.sharding import PARTIAL, REPLICATE, Layout, Mode, Price, Problem, Sharding, shard, sharded
from heterodyne.graph.sharding.solve import solve
from pure.graph.sharding.by_hand import B, Made, price, problem

HERE = Path(__file__).parent
EXCHANGES_ALONE = Price(members=2, unevenness=1.5, latency_bytes=2.0**30, flops_per_byte=1e9, traffic_per_byte=1e9)


def layer(made: Made, x: Ref, width: int, *, times: int = 4, length: int = 16) -> Ref:
    """A norm, and an MLP beside the residual stream."""
    normed = made.op("rms_norm", B, length, width, input=x, normalized_shape=(width,), weight=made.parameter(width))
    up = made.linear(normed, width, times * width)
    active = made.op("gelu", B, length, times * width, self=up)
    return made.op("add", B, length, width, self=x, other=made.linear(active, times * width, width))


def layers(count: int, width: int = 64) -> tuple[Made, Ref, list[int]]:
    """A stack of them; with the places of their first ops."""
    made = Made()
    x = made.op("gelu", B, 16, width, self=made.input(B, 16, width))
    starts = []
    for _ in range(count):
        starts.append(len(made.graph().ops))
        x = layer(made, x, width)
    return made, made.op("sum", self=x), starts


def letters(found: Sharding, kind: str) -> list[str]:
    return [strategy.name for name, strategy in found.strategies.items() if name.startswith(kind)]


def exchanged(found: Sharding, least_bytes: float = 0) -> Counter[str]:
    """The collectives of the forward, of tensors that are large enough."""
    steps = [entry.steps.forward for entry in found.exchanges if entry.bytes(4) >= least_bytes]
    return Counter(kind for kind in steps if kind is not None)


def solved(made: Made, wanted: dict[Ref, Layout], costs: Price, starts: tuple[int, ...] | list[int] = ()) -> Sharding:
    asked = problem(made.graph(layers=starts), wanted, costs=costs)
    return shard(asked, [(2, 1)], {})


@pytest.mark.tour("graph/sharding/")
def test_an_mlp_is_cut_by_columns_and_then_by_rows() -> None:
    """Shoeybi et al., "Megatron-LM", 2019: one sum, after the second matrix."""
    made = Made()
    x = made.op("gelu", B, 16, 64, self=made.input(B, 16, 64))
    active = made.op("gelu", B, 16, 256, self=made.linear(x, 64, 256))
    out = made.linear(active, 256, 64)
    found = solved(made, {out: REPLICATE}, EXCHANGES_ALONE)
    assert letters(found, "linear") == ["o", "k"]
    assert found.stored("w0") == (0, (168, 88))
    assert found.stored("w1") == (1, (168, 88))
    assert exchanged(found) == {"all_reduce": 1}


def test_what_only_one_device_need_do_is_shared_along_the_sequence_where_repeating_it_costs() -> None:
    """Korthikanti et al., 2022: a sum goes into slices, and comes back together ahead of the next matrix."""
    made, loss, starts = layers(3)
    costs = Price(members=2, unevenness=3.0, latency_bytes=1.0, flops_per_byte=1e9, traffic_per_byte=1.0)
    kinds = exchanged(solved(made, {loss: PARTIAL}, costs, starts), least_bytes=1e4)
    assert kinds["all_reduce"] == 0
    assert kinds["reduce_scatter"] >= 3
    assert kinds["all_gather"] >= 3


def test_where_beginning_an_exchange_costs_most_there_is_one_for_each_mlp() -> None:
    """But for the last one, whose parts the loss adds up."""
    made, loss, starts = layers(3)
    assert exchanged(solved(made, {loss: PARTIAL}, EXCHANGES_ALONE, starts)) == {"all_reduce": 2}


@pytest.mark.parametrize(("classes", "letter"), [(4096, "o"), (8, "k")])
def test_a_head_is_cut_by_classes_where_these_are_many_and_by_features_where_these_are(
    classes: int, letter: str
) -> None:
    """Whale's two ways to split a large classifier: its features are gathered, or its logits are summed."""
    made = Made()
    hidden = made.linear(made.input(B, 16, 128), 128, 128)
    logits = made.linear(hidden, 128, classes)
    flat = made.op("view", B * 16, classes, self=logits, size=())
    labels = made.input(B * 16, dtype="int64")
    loss = made.op("cross_entropy_loss", self=flat, target=labels, weight=None, reduction=1)
    found = solved(made, {loss: PARTIAL}, price(latency=1.0, flops_per_byte=1e9))
    assert letters(found, "linear")[-1] == letter
    assert letters(found, "cross_entropy") == ["C" if letter == "o" else "N"]


def test_samples_are_shared_in_replicated_regions_and_meet_the_split_ones() -> None:
    made = Made()
    x = made.linear(made.input(B, 64), 64, 64)
    logits = made.linear(x, 64, 512)
    loss = made.op("sum", self=logits)
    graph = made.graph()
    modes = {op.name: Mode("replicate", 0) for op in graph.ops} | {logits.name: Mode("split", 1)}
    asked = Problem(graph=graph, ops=graph.ops, modes=modes, given={}, wanted={loss: PARTIAL}, samples=6, price=price())
    found = shard(asked, [(2, 1), (1, 3)], {})
    assert [found.strategies[ref.name].name for ref in (x, logits, loss)] == ["a", "o", "a"]
    assert found.stored("w1") == (0, (128, 384))
    assert found.sizes(x, sharded(0), 6) == (4, 2)


def test_a_sequence_is_cut_and_weights_are_whole_in_context() -> None:
    made, loss, starts = layers(2)
    asked = problem(made.graph(layers=starts), {loss: PARTIAL}, mode=Mode("context"), costs=price(flops_per_byte=1.0))
    found = shard(asked, [(2, 1)], {})
    assert {name: strategy.name for name, strategy in found.strategies.items()} == dict.fromkeys(found.strategies, "b")
    assert all(found.stored(p.name) is None for p in made.graph().parameters)


def test_masks_are_whole_until_they_are_read() -> None:
    made = Made()
    x = made.op("gelu", B, 16, 64, self=made.input(B, 16, 64))
    mask = made.op("gt", B, 16, 64, self=made.input(B, 16, 64), other=0, dtype="bool", flows=False)
    out = made.op("mul", B, 16, 64, self=x, other=mask)
    found = solved(made, {out: sharded(1)}, price())
    assert found.strategies[mask.name].name == "whole"
    assert [entry.steps.forward for entry in found.exchanges if entry.tensor == mask] == [None]


def in_place(given: dict[Ref, Layout] | None = None) -> tuple[Made, dict[Ref, Layout]]:
    """A linear layer, and running sums written into its result along the dim by which it would be cut."""
    made = Made()
    x = made.input(B, 8)
    y = made.op("linear", B, 64, memory="y", input=x, weight=made.parameter(64, 8), bias=None)
    done = made.op("cumsum_", B, 64, memory="y", writes=("y",), self=y, dim=1)
    return made, {made.op("sum", self=done): PARTIAL} | (given or {})


def test_what_is_written_into_in_whole_is_whole_from_the_start() -> None:
    made, wanted = in_place()
    found = solved(made, wanted, price(flops_per_byte=1.0))
    assert letters(found, "linear") == letters(found, "cumsum") == ["whole"]


def test_what_comes_in_parts_and_is_written_into_in_whole_is_refused() -> None:
    made = Made()
    y = made.op("gelu", B, 64, memory="y", self=made.input(B, 64))
    done = made.op("roll_", B, 64, memory="y", writes=("y",), self=y)
    graph = made.graph()
    asked = Problem(
        graph=graph,
        ops=graph.ops[1:],
        modes={done.name: Mode("split")},
        given={y: sharded(0)},
        wanted={done: sharded(0)},
        samples=4,
        price=price(),
    )
    with pytest.raises(PlanError, match="works in place"):
        solve(asked)


@pytest.mark.parametrize("kind", ["split", "context"])
def test_like_layers_are_done_alike_as_if_each_was_searched_for(kind: str) -> None:
    made, loss, starts = layers(5)
    apart = [solve(problem(made.graph(layers=borders), {loss: PARTIAL}, mode=Mode(kind))) for borders in (starts, [])]  # type: ignore[arg-type]
    assert apart[0].strategies == apart[1].strategies
    assert apart[0].cost == apart[1].cost
    of_layers = [[apart[0].strategies[op.name].name for op in made.graph().ops[a:b]] for a, b in pairwise(starts[1:])]
    assert len({tuple(names) for names in of_layers}) == 1


@st.composite
def stacks(draw: st.DrawFn) -> tuple[ModelGraph, Ref]:
    """A few layers of some width, each with a residual stream around it or not."""
    made = Made()
    width = 16
    x = made.op("gelu", B, 8, width, self=made.input(B, 8, width))
    for _ in range(draw(st.integers(1, 3))):
        wide = draw(st.sampled_from((4, 16, 64)))
        hidden = made.linear(x, width, wide)
        for kind in draw(st.lists(st.sampled_from(("gelu", "rms_norm", "softmax")), max_size=2)):
            more = {"normalized_shape": (wide,)} if kind == "rms_norm" else {"dim": 1} if kind == "softmax" else {}
            hidden = made.op(kind, B, 8, wide, self=hidden, **more)
        back = made.linear(hidden, wide, width)
        x = made.op("add", B, 8, width, self=x, other=back) if draw(st.booleans()) else back
    return made.graph(), x


@settings(max_examples=60)
@given(
    stacks(),
    st.sampled_from((REPLICATE, PARTIAL, sharded(0), sharded(2))),
    st.sampled_from((1.0, 64.0, 2.0**16)),
    st.sampled_from((1.0, 100.0, 1e6)),
)
def test_of_a_few_layers_no_way_is_cheaper(
    stack: tuple[ModelGraph, Ref], want: Layout, latency: float, flops_per_byte: float
) -> None:
    graph, result = stack
    asked = problem(graph, {result: want}, costs=price(latency=latency, flops_per_byte=flops_per_byte))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heterodyne.graph.sharding.solve.BEAM", 10**6)
        patch.setattr("heterodyne.graph.sharding.solve._CHAMPIONS", 0)
        best = solve(asked)  # of all ways
    assert best.optimal
    found = solve(asked)
    assert found.cost == best.cost or (not found.optimal and found.cost > best.cost)


def test_a_conversion_that_later_reads_make_dearer_rules_no_way_out() -> None:
    """What is converted stays as it was made: from there a second reader may have a longer way than from where it was converted to."""
    made = Made()
    x = made.op("gelu", B, 8, 16, self=made.input(B, 8, 16))
    x = made.linear(made.op("gelu", B, 8, 16, self=made.linear(x, 16, 16)), 16, 16)
    x = made.op("add", B, 8, 16, self=x, other=made.linear(made.linear(x, 16, 64), 64, 16))
    x = made.linear(made.linear(x, 16, 16), 16, 16)
    asked = problem(made.graph(), {x: PARTIAL}, costs=price(latency=64.0, flops_per_byte=1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heterodyne.graph.sharding.solve.BEAM", 10**6)
        patch.setattr("heterodyne.graph.sharding.solve._CHAMPIONS", 0)
        best = solve(asked).cost
    found = solve(asked)
    assert found.optimal
    assert found.cost == best


def told() -> str:
    """All that is decided of a stack, as text."""
    made, loss, starts = layers(3)
    found = solved(made, {loss: PARTIAL}, price(), starts)
    return repr((dict(found.strategies), sorted(map(repr, found.layouts.items())), found.exchanges))


def test_processes_that_hash_differently_decide_alike() -> None:
    code = "from pure.graph.sharding.test_solve import told; print(told())"
    path = os.pathsep.join([str(HERE.parents[2]), *sys.path])
    apart = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert apart[0] == apart[1] == f"{told()}\n"
