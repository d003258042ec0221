"""The costs of stages: they add up to the model, hold what they read, and send what crosses between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster import Link, LinkSample
from heterodyne.cost.collective import Collectives
from heterodyne.cost.compute import Pass, compute_of
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.graph import ModelGraph, Size
from heterodyne.plan import Action, Layout, MicroBatches, Pipeline, Plan, Program, Region, Stage
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.sim import simulate
from pure.build import cluster, device_profile, graph, linear, profile
from pure.sim.pipelines import with_messages

MODEL = graph(4)
END = len(MODEL.ops)
MACHINES = replace(
    cluster(4, nodes=2),
    links=(
        Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e6, latency_s=0.25),
        Link(between=("n1", "n1"), bandwidth_bytes_per_s=1e6, latency_s=0.25),
        Link(between=("n0", "n1"), bandwidth_bytes_per_s=1e3, latency_s=0.5),
    ),
)
IDS = [device.id for device in MACHINES.devices]
BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)
MEASURED = profile(MODEL, MACHINES, [linear(0.6)] * 4, optimizer_s=0.2)
COSTS = CostModel(graph=MODEL, cluster=MACHINES, profile=MEASURED, memory=BARE)
CUTS = st.lists(st.integers(1, END - 1), unique=True, max_size=4).map(lambda cuts: (0, *sorted(cuts), END))
ONE_SAMPLE = 8 * 4  # bytes of a value


def pipeline(
    starts: Sequence[int],
    devices: Sequence[tuple[str, ...]],
    sizes: tuple[int, ...] = (4, 4),
    shares: Sequence[tuple[int, ...]] = (),
    recompute: Sequence[tuple[int, ...]] = (),
    model: ModelGraph = MODEL,
) -> Pipeline:
    ranges = list(pairwise((*starts, len(model.ops))))
    return Pipeline(
        micro_batches=MicroBatches(sizes),
        stages=tuple(
            Stage(
                ops=ops,
                devices=own,
                regions=(Region(layout=Layout(shares=shares[number] if shares else (1,) * len(own))),),
                recompute=recompute[number] if recompute else (),
            )
            for number, (ops, own) in enumerate(zip(ranges, devices, strict=True))
        ),
    )


def planned(*pipelines: Pipeline, model: ModelGraph = MODEL, bucket_bytes: int = 1) -> Plan:
    return Plan(
        model=model.fingerprint,
        cluster=MACHINES.fingerprint,
        global_batch_size=sum(p.micro_batches.samples for p in pipelines),
        bucket_bytes=bucket_bytes,
        pipelines=pipelines,
    )


def rank_of(costs: StepCosts, rank: int) -> RankCosts:
    own = costs.ranks[rank]
    assert own is not None
    return own


@given(CUTS, st.integers(1, 12), st.sampled_from(["F", "B", "I", "W"]))
def test_the_stages_add_up_to_the_model_wherever_it_is_cut(cuts: tuple[int, ...], size: int, kind: Pass) -> None:
    compute = COSTS.compute[IDS[0]]
    whole = compute.seconds(kind, (0, END), size)
    assert sum(compute.seconds(kind, ops, size) for ops in pairwise(cuts)) == pytest.approx(whole)
    halves = compute.seconds("I", (0, END), size) + compute.seconds("W", (0, END), size)
    assert halves == pytest.approx(compute.backward.total(size))


def test_a_block_that_is_cut_inside_counts_by_its_operations() -> None:
    heavy = replace(MODEL.ops[2], flops_forward=MODEL.ops[1].flops_forward * 3)
    model = replace(MODEL, ops=(*MODEL.ops[:2], heavy, *MODEL.ops[3:]))
    compute = compute_of(model, "d", device_profile(model, linear(0.6)))
    layer = compute.seconds("F", (1, 3), 4)
    assert compute.seconds("F", (1, 2), 4) == pytest.approx(layer / 4)
    assert compute.seconds("B", (1, 2), 4) == pytest.approx(compute.seconds("B", (1, 3), 4) / 2)


def test_an_op_with_weights_spends_half_of_its_backward_on_them_or_all_where_nothing_is_behind_it() -> None:
    """The first op reads only the model's input, so all of its backward is W."""
    compute = compute_of(MODEL, "d", device_profile(MODEL, linear(0.6)))
    assert compute.seconds("W", (0, 1), 4) == pytest.approx(compute.seconds("B", (0, 1), 4))
    assert compute.seconds("W", (1, END), 4) == pytest.approx(compute.seconds("B", (1, END), 4) / 2)
    frozen = replace(MODEL, parameters=tuple(replace(p, trainable=False) for p in MODEL.parameters))
    assert compute_of(frozen, "d", device_profile(frozen, linear(0.6))).seconds("W", (0, END), 4) == 0


@pytest.mark.parametrize("calibration", [1.0, 1.5])
def test_halves_take_what_was_measured_of_them_however_much_more_than_the_whole(calibration: float) -> None:
    """As each block is to the whole model, so are its halves; the stages of a model add up to it in them too."""
    measured = replace(device_profile(MODEL, linear(0.6)), calibration=calibration)
    halved = tuple(
        replace(s, halved_forward_s=s.forward_s * 1.2, input_s=s.backward_s * 0.8, weight_s=s.backward_s * 0.3)
        for s in measured.blocks["layer"]
    )
    compute = compute_of(MODEL, "d", replace(measured, blocks={**measured.blocks, "layer": halved}))
    forward, backward = (compute.seconds(kind, (1, 3), 4) for kind in ("F", "B"))
    assert compute.seconds("H", (1, 3), 4) == pytest.approx(1.2 * forward)
    assert compute.seconds("I", (1, 3), 4) == pytest.approx(0.8 * backward)
    assert compute.seconds("W", (1, 3), 4) == pytest.approx(0.3 * backward)
    cut = [compute.seconds("H", ops, 4) for ops in ((0, 2), (2, END))]
    assert sum(cut) == pytest.approx(compute.seconds("H", (0, END), 4))


def test_between_its_halves_a_backward_holds_what_enters_and_what_comes_back() -> None:
    """Five ops with weights: a value enters four of them (the model's own input is not counted), a gradient comes to each."""
    assert COSTS.passes.of(IDS[0], (0, 5), (2,)).weight_bytes == (2 * (4 + 5) * ONE_SAMPLE,)


def test_what_crosses_goes_forth_and_its_gradient_back() -> None:
    costs = COSTS.of(planned(pipeline((0, 3, 5), [(IDS[0],), (IDS[1],), (IDS[3],)])))
    ways = {(route.kind, route.source, route.destination): route for route in costs.routes}
    assert set(ways) == {
        ("F", (0, 0), (1, 1)),
        ("F", (1, 1), (3, 2)),
        ("B", (1, 1), (0, 0)),
        ("B", (3, 2), (1, 1)),
    }
    between = ways["F", (0, 0), (1, 1)]
    assert between.bytes == (4 * ONE_SAMPLE,) * 2
    assert between.seconds == pytest.approx((4 * ONE_SAMPLE / 1e3,) * 2)
    assert (between.latency_s, between.link) == (0.5, "n0 -> n1")
    assert ways["B", (1, 1), (0, 0)].link == "n1 -> n0"
    assert ways["F", (1, 1), (3, 2)].link == f"{IDS[1]} -> {IDS[3]}"


def test_a_value_that_skips_a_stage_travels_straight() -> None:
    last = replace(MODEL.ops[-1], inputs=(*MODEL.ops[-1].inputs, MODEL.ops[0].name))
    model = replace(MODEL, ops=(*MODEL.ops[:-1], last))
    costs = CostModel(graph=model, cluster=MACHINES, profile=MEASURED, memory=BARE)
    made = costs.of(planned(pipeline((0, 3, 5), [(IDS[0],), (IDS[1],), (IDS[2],)], model=model), model=model))
    assert {(r.source, r.destination) for r in made.routes if r.kind == "F"} == {
        ((0, 0), (1, 1)),
        ((1, 1), (2, 2)),
        ((0, 0), (2, 2)),
    }


@given(st.tuples(st.integers(0, 4), st.integers(1, 4)), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_unequal_slices_of_a_stage_exchange_what_they_have_in_common(shares: tuple[int, int], sizes: list[int]) -> None:
    made = pipeline((0, 5), [(IDS[0], IDS[1]), (IDS[2], IDS[3])], tuple(sizes), [shares, (1, 1)])
    costs = COSTS.of(planned(made))
    for kind in ("F", "B"):
        for index, size in enumerate(sizes):
            assert sum(r.bytes[index] for r in costs.routes if r.kind == kind) == size * ONE_SAMPLE
    for stage, ranks in ((0, (0, 1)), (1, (2, 3))):
        whole = COSTS.compute[IDS[0]].seconds("F", made.stages[stage].ops, 1)
        own = [sum(rank_of(costs, rank).stages[stage].forward_s) for rank in ranks]
        assert sum(own) == pytest.approx(sum(sizes) * whole)


def test_stages_on_one_device_send_nothing_to_each_other() -> None:
    """A V of four stages on two devices: the turn stays on one of them."""
    costs = COSTS.of(planned(pipeline((0, 2, 4, 6), [(IDS[0],), (IDS[1],), (IDS[1],), (IDS[0],)])))
    assert {(r.source, r.destination) for r in costs.routes if r.kind == "F"} == {((0, 0), (1, 1)), ((1, 2), (0, 3))}
    assert list(rank_of(costs, 0).stages) == [0, 3]


def test_a_device_holds_what_its_stages_read_and_updates_only_that() -> None:
    whole = COSTS.memory_use(IDS[0], 0)
    starts = (0, 3, 5)
    costs = COSTS.of(planned(pipeline(starts, [(IDS[0],), (IDS[1],), (IDS[2],)])))
    ops = [3, 2, END - 5]
    for rank, count in enumerate(ops):
        own = rank_of(costs, rank)
        assert own.step_s == pytest.approx(0.2 * count / END)
        use = COSTS.memory_use(IDS[rank], 0, [(starts[rank], (*starts, END)[rank + 1])])
        assert (use.parameters, use.optimizer) == (whole.parameters * count // END, whole.optimizer * count // END)
        assert own.fixed_bytes == use.fixed
    assert costs.ranks[3] is None


def test_a_tied_parameter_is_held_and_updated_on_both_sides_and_summed() -> None:
    head = replace(MODEL.ops[-1], parameters=MODEL.ops[0].parameters)
    model = replace(MODEL, ops=(*MODEL.ops[:-1], head), parameters=MODEL.parameters[:-1])
    tied = CostModel(graph=model, cluster=MACHINES, profile=MEASURED, memory=BARE)
    costs = tied.of(planned(pipeline((0, 5), [(IDS[0],), (IDS[1],)], model=model), model=model))
    summed = [bucket for bucket, seconds in enumerate(costs.reduce_s) if seconds > 0]
    assert len(summed) == 1
    first, last = rank_of(costs, 0), rank_of(costs, 1)
    assert summed[0] in first.ready
    assert summed[0] in last.ready
    assert first.ready[summed[0]] == ((0, pytest.approx(1.0)),)  # the embedding is the last to have its gradient
    assert last.ready[summed[0]][0][1] < 0.5  # the head the first


def test_a_bucket_of_one_owner_costs_nothing_and_replicas_sum_theirs() -> None:
    alone = COSTS.of(planned(pipeline((0, 5), [(IDS[0],), (IDS[1],)])))
    assert set(alone.reduce_s) == {0.0}
    assert alone.norm_s is not None
    both = COSTS.of(planned(*(pipeline((0, 5), [(a,), (b,)]) for a, b in (IDS[:2], IDS[2:]))))
    assert min(both.reduce_s) > 0
    assert rank_of(both, 0).ready.keys() == rank_of(both, 2).ready.keys()
    assert rank_of(both, 0).ready.keys().isdisjoint(rank_of(both, 1).ready)
    whole = COSTS.of(planned(pipeline((0,), [(IDS[0],)]), pipeline((0,), [(IDS[1],)])))
    assert whole.norm_s is None  # each has all gradients


def test_what_is_recomputed_takes_its_forward_again_and_keeps_its_inputs() -> None:
    """Layers 0 and 1 (blocks 1 and 2) of the first stage; each op keeps 1000 bytes a sample, each value has 32."""
    kept, dropped = (
        rank_of(COSTS.of(planned(pipeline((0, 5), [(IDS[0],), (IDS[1],)], recompute=[again, ()]))), 0).stages[0]
        for again in ((), (1, 2))
    )
    assert kept.recompute_s == (0.0, 0.0)
    # Of the two products of each, the last one is not done again: nothing needs what it makes.
    assert dropped.recompute_s == pytest.approx((COSTS.compute[IDS[0]].seconds("F", (1, 5), 4) / 2,) * 2)
    assert kept.kept_bytes == (4 * (5 * 1000 + ONE_SAMPLE),) * 2  # what it makes for the next stage is kept too
    assert dropped.kept_bytes == (4 * (1000 + 3 * ONE_SAMPLE),) * 2
    assert dropped.recomputed_bytes == (4 * 4000,) * 2
    # What is made again stands beside what was kept of the first time, and has its gradient.
    assert dropped.redone_bytes == (4 * (2000 + 2 * ONE_SAMPLE),) * 2


def test_a_pair_without_a_measurement_is_read_off_the_collective_around_it() -> None:
    """A ring of 4 makes 6 transfers of a quarter of the bytes."""
    bare = replace(MACHINES, links=())
    samples = tuple(
        LinkSample(op="all_reduce", devices=tuple(IDS), bytes=size, seconds=6e-3 + 6e-6 * size, spread=0.0)
        for size in (1_000, 100_000)
    )
    send = Collectives(cluster=bare, samples=samples).send(IDS[0], IDS[1])
    assert (send.latency_s, send.s_per_byte) == (pytest.approx(1e-3), pytest.approx(4e-6))


def test_sizes_that_follow_the_batch_in_any_way_are_taken_at_the_size_of_the_slice() -> None:
    made = COSTS.passes.of(IDS[0], (0, 5), (2, 3, 2), leaving=Size((10, 1)))
    assert made.kept_bytes == (2 * 5000 + 12, 3 * 5000 + 13, 2 * 5000 + 12)
    assert COSTS.passes.of(IDS[0], (0, 5), ()).forward_s == ()


@given(CUTS, st.lists(st.integers(1, 6), min_size=1, max_size=5), st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_no_plan_takes_less_than_its_lower_bound(cuts: tuple[int, ...], sizes: list[int], overlap: float) -> None:
    places = [(IDS[number % 4],) for number in range(min(4, len(cuts) - 1))]
    starts = cuts[: len(places)]
    measured = profile(MODEL, MACHINES, [linear(0.1 * n, 0.01) for n in (1, 2, 4, 8)], optimizer_s=0.2, overlap=overlap)
    made = CostModel(graph=MODEL, cluster=MACHINES, profile=measured).of(
        planned(pipeline(starts, places, tuple(sizes)))
    )
    orders = SCHEDULES["1F1B"].orders(len(places), 1, len(sizes))
    update = (Action(0, "CLIP"), Action(0, "STEP"))
    busy = [(*actions, *update) for actions in with_messages(orders, range(len(places))).ranks]
    played = simulate(Program(ranks=(*busy, *((),) * (4 - len(places)))), made)
    assert played.step_s >= made.lower_bound_s - 1e-9
    assert all(peak > 0 for peak in played.peak_bytes[: len(places)])
