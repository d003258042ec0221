"""Stages that lie in parts on their devices: what theory says of their seconds, their exchanges and their memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster import Link
from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.cost.model import CostModel
from heterodyne.cost.op_shares import StageShares
from heterodyne.cost.sharded_stage import ShardedStageCost
from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import StepCosts
from heterodyne.graph import ModelGraph
from heterodyne.graph.ir import Ref
from heterodyne.plan import Axis, Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.plan.lower import lower
from heterodyne.plan.plan import Exchange
from heterodyne.plan.weights import PlannedWeights
from heterodyne.sim import simulate
from pure.build import cluster, linear, profile
from pure.cost.transformer import HIDDEN_BYTES, transformer

BARE = MemoryAssumptions(context_bytes={"cpu": 0}, fragmentation=0.0, block_bytes=0)
SAMPLES = 12
FREE = Exchange(latency_bytes=0)
KINDS = ("split", "context")


def stage(model: ModelGraph, kind: str, ids: tuple[str, ...], shares: tuple[int, ...], **changes: object) -> Stage:
    region = Region(layout=Layout(kind=kind, shares=shares))  # type: ignore[arg-type]  # one of the kinds
    made = Stage(ops=(0, len(model.ops)), devices=ids, regions=(region,), exchange=FREE)
    return made.model_copy(update=changes)


def costs_of(
    model: ModelGraph,
    speeds: tuple[float, ...],
    *,
    link: Link | None = None,
    fixed_s: float = 0.0,
    saved: int = 0,
    optimizer_s: float = 0.0,
) -> tuple[CostModel, tuple[str, ...]]:
    """Devices of which each needs so many seconds a sample, and their ids. Without ``optimizer_s`` their memories take no time either."""
    machines = cluster(len(speeds), link=link)
    seconds = [linear(speed, fixed_s) for speed in speeds]
    measured = profile(model, machines, seconds, optimizer_s=optimizer_s, saved=saved)
    made = CostModel(graph=model, cluster=machines, profile=measured, memory=BARE)
    return made, tuple(device.id for device in machines.devices)


def planned(costs: CostModel, *stages: Stage, sizes: tuple[int, ...] = (SAMPLES,)) -> Plan:
    used = {device for each in stages for device in each.devices}
    return Plan(
        model=costs.graph.fingerprint,
        cluster=costs.cluster.fingerprint,
        global_batch_size=sum(sizes),
        pipelines=(Pipeline(micro_batches=MicroBatches(sizes), stages=stages),),
        idle=tuple(device.id for device in costs.cluster.devices if device.id not in used),
    )


def sharded_stage(
    costs: CostModel, ids: tuple[str, ...], shares: tuple[int, ...], kind: str = "split"
) -> ShardedStageCost:
    found = costs.sharded_stage(planned(costs, stage(costs.graph, kind, ids, shares)).pipelines[0], 0)
    assert found is not None
    return found


def stage_costs(costs: StepCosts, rank: int, number: int = 0) -> StageCosts:
    own = costs.ranks[rank]
    assert own is not None
    return own.stages[number]


def divided(made: ShardedStageCost) -> list[float]:
    """Of each block the part of its operations that is divided among the members."""
    found = []
    for block in made.graph.blocks:
        ops = made.graph.ops_of(block)
        flops = [op.flops_forward(1) for op in ops]
        parts = [made.sharding.strategies[op.name].divides for op in ops]
        found.append(sum(f for f, divides in zip(flops, parts, strict=True) if divides) / sum(flops))
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(st.integers(1, 8))
@settings(deadline=None, max_examples=10)
def test_a_member_that_has_everything_takes_what_an_undivided_stage_takes(kind: str, samples: int) -> None:
    costs, ids = costs_of(transformer(moves=True), (0.6, 0.6))
    made = sharded_stage(costs, ids, (1, 0), kind)
    whole, ops = costs.compute[ids[0]], (0, len(costs.graph.ops))
    assert made.alone_s(0, "W", samples) == pytest.approx(whole.seconds("W", ops, samples))
    for passed in ("F", "B", "I"):
        if kind == "split":  # without keys that a causal mask hides from its queries
            assert made.alone_s(0, passed, samples) == pytest.approx(whole.seconds(passed, ops, samples))
        assert made.together_s(passed, samples)[0] >= whole.seconds(passed, ops, samples) * (1 - 1e-9)


def test_rows_of_a_mesh_cost_what_pipelines_of_their_own_would() -> None:
    """Rows share nothing but the micro-batches, of which one may have nothing."""
    costs, ids = costs_of(transformer(moves=True), (0.6, 0.9, 0.3, 0.5), fixed_s=0.01, saved=100, optimizer_s=1e-9)
    whole = stage(costs.graph, "split", ids, (2, 1))
    layout = Layout(shares=(1, 2), inner=(Axis(kind="split", shares=(2, 1)),))
    mesh = planned(costs, whole.model_copy(update={"regions": (Region(layout=layout),)}), sizes=(6, 1, 3))
    own = [(ids[:2], (2, 1)), (ids[2:], (4, 1, 2))]
    apart = mesh.model_copy(
        update={
            "pipelines": tuple(
                Pipeline(micro_batches=MicroBatches(sizes), stages=(whole.model_copy(update={"devices": devices}),))
                for devices, sizes in own
            )
        }
    )
    as_rows, as_pipelines = costs.of(mesh), costs.of(apart)
    assert as_rows.reduce_s == as_pipelines.reduce_s
    for rank in (2, 3):  # of the first row the second micro-batch is none
        assert stage_costs(as_rows, rank) == stage_costs(as_pipelines, rank)
    first, alone = stage_costs(as_rows, 0), stage_costs(as_pipelines, 0)
    assert (first.forward_s[0], first.forward_s[2]) == alone.forward_s
    assert first.forward_s[1] == first.backward_s[1] == first.kept_bytes[1] == 0
    assert first.together == (0, 1)
    steps = [simulate(lower(plan, costs.graph, costs.cluster).program, costs.of(plan)).step_s for plan in (mesh, apart)]
    assert steps[0] == pytest.approx(steps[1])


@pytest.mark.parametrize("members", [2, 3, 4])
def test_equal_devices_with_equal_widths_and_free_links_each_take_their_part_of_what_divides(members: int) -> None:
    costs, ids = costs_of(transformer(), (0.6,) * members)
    made = sharded_stage(costs, ids, (1,) * members)
    blocks = divided(made)
    assert blocks[:-1] == pytest.approx([1.0] * (len(blocks) - 1))  # only the sum at the end is done by each
    for kind in ("F", "B"):
        whole = costs.compute[ids[0]].seconds(kind, (0, len(costs.graph.ops)), SAMPLES)
        expected = sum(whole / len(blocks) * (part / members + 1 - part) for part in blocks)
        seconds, exchanged = made.together_s(kind, SAMPLES)
        assert seconds == pytest.approx(expected)
        assert exchanged == pytest.approx(0.0, abs=1e-12)


def test_what_a_pass_takes_whatever_its_size_is_not_saved_by_a_part_of_it() -> None:
    costs, ids = costs_of(transformer(), (0.6, 0.6), fixed_s=0.3)
    made = sharded_stage(costs, ids, (1, 1))
    first = costs.graph.blocks[0]
    forward = made.alone_s(0, "F", SAMPLES, (first.start, first.stop))
    assert forward == pytest.approx((0.3 + 0.6 * SAMPLES / 2) / len(costs.graph.blocks) / 3)


@pytest.mark.parametrize("shares", [(2, 1), (1, 3), (1, 2, 1)])
def test_unequal_speeds_with_shares_in_proportion_take_equally_long(shares: tuple[int, ...]) -> None:
    costs, ids = costs_of(transformer(), tuple(0.6 / share for share in shares))
    made = sharded_stage(costs, ids, shares)
    last = costs.graph.blocks[-1].start
    seconds = [made.alone_s(member, "F", SAMPLES, (0, last)) for member in range(len(shares))]
    assert seconds == pytest.approx([seconds[0]] * len(shares))
    assert made.together_s("F", SAMPLES, (0, last))[0] == pytest.approx(seconds[0])
    equal = sharded_stage(costs, ids, (1,) * len(shares))
    assert equal.together_s("F", SAMPLES, (0, last))[0] > 1.1 * seconds[0]


@pytest.mark.parametrize("members", [2, 3, 4])
def test_a_block_exchanges_two_all_reduces_forward_and_two_backward(members: int) -> None:
    """Shoeybi et al., "Megatron-LM", 2019, section 3. An all-reduce sends 2 (n - 1) / n of its tensor from each member."""

    def sent(layers: int) -> tuple[float, float]:
        costs, ids = costs_of(transformer(layers), (0.6,) * members)
        meetings = [meeting for _, meeting in sharded_stage(costs, ids, (1,) * members).line(SAMPLES)]
        return tuple(  # type: ignore[return-value]
            sum(
                size
                for meeting in meetings
                for each in getattr(meeting, way)
                for i, row in enumerate(each)
                for j, size in enumerate(row)
                if i != j
            )
            for way in ("forward", "backward")
        )

    of_a_block = [more - less for more, less in zip(sent(3), sent(2), strict=True)]
    each_member = SAMPLES * HIDDEN_BYTES  # small, so an all-reduce is one round of everything to everyone
    assert of_a_block == pytest.approx([2 * members * (members - 1) * each_member] * 2)


@given(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4)), st.sampled_from(KINDS))
@settings(deadline=None, max_examples=15)
def test_parts_make_up_the_whole(shares: tuple[int, ...], kind: str) -> None:
    costs, ids = costs_of(transformer(moves=True), (0.6,) * 3)
    made = sharded_stage(costs, ids, shares, kind)
    parts = StageShares(sharding=made.sharding, samples=SAMPLES)
    for op in costs.graph.ops:
        found = parts.of_op(op)
        whole = sum(found.operations)
        if made.sharding.strategies[op.name].divides:
            assert whole == pytest.approx(1) or (kind == "context" and 1 <= whole <= 3)
        else:
            assert found.operations == (1.0,) * 3
        for values in (found.operations, found.read, found.written, found.kept):
            assert all(0 <= value <= 1 + 1e-9 for value in values)
            assert sum(values) >= 1 - 1e-9


def meshed(model: ModelGraph, ids: tuple[str, ...], *axes: tuple[str, tuple[int, ...]]) -> Stage:
    outer, *inner = (Axis(kind=kind, shares=shares) for kind, shares in axes)  # type: ignore[arg-type]
    layout = Layout(kind=outer.kind, shares=outer.shares, inner=tuple(inner))
    return stage(model, "split", ids, (1,) * len(ids), regions=(Region(layout=layout),))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", [True, False])
def test_an_axis_of_one_member_costs_nothing(kind: str, outer: bool) -> None:
    costs, ids = costs_of(transformer(moves=True), (0.6, 0.3, 0.4), fixed_s=0.01, saved=100, optimizer_s=1e-9)
    own, other = (kind, (3, 2, 1)), (KINDS[kind == KINDS[0]], (1,))
    mesh = meshed(costs.graph, ids, *((other, own) if outer else (own, other)))
    made, alone = (costs.of(planned(costs, each)) for each in (mesh, stage(costs.graph, *own[:1], ids, own[1])))
    assert made == alone


@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1]])
def test_what_two_axes_divide_both_do_and_only_those_of_one_line_exchange(kinds: tuple[str, str]) -> None:
    link = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e6, latency_s=1e-3)
    costs, ids = costs_of(transformer(moves=True), (0.6, 0.3, 0.4, 0.2, 0.5, 0.7), link=link)
    axes = (kinds[0], (2, 1)), (kinds[1], (1, 3, 2))
    plan = planned(costs, meshed(costs.graph, ids, *axes), sizes=(SAMPLES, 3))
    made = costs.sharded_stage(plan.pipelines[0], 0)
    assert made is not None
    parts = made.parts(SAMPLES)
    both = 0
    for op in costs.graph.ops:
        divides = [axis.strategies[op.name].divides for axis in made.sharding.axes]
        both += all(divides)
        whole = sum(parts.of_op(op).operations)
        expected = prod(1 if cut else members for cut, members in zip(divides, (2, 3), strict=True))
        causal = op.kind == "scaled_dot_product_attention"
        assert whole == pytest.approx(expected) or (causal and expected <= whole <= 6)
    assert both > 0
    for parameter in costs.graph.parameters:
        boxes = made.sharding.boxes(parameter.name)
        assert boxes[:3] == boxes[3:] if kinds[0] == "context" else boxes[::3] == (boxes[0], boxes[3])
    exchanged = [each for _, meeting in made.line(SAMPLES) for each in (*meeting.forward, *meeting.backward)]
    sent = {(a, b) for each in exchanged for a, row in enumerate(each) for b, size in enumerate(row) if size}
    assert sent
    assert all(a % 3 == b % 3 or a // 3 == b // 3 for a, b in sent)
    assert simulate(lower(plan, costs.graph, costs.cluster).program, costs.of(plan)).exchange_s[0] > 0


def test_what_a_stage_would_make_for_nobody_is_no_part_of_it() -> None:
    model = transformer()
    *_, norm = (op for op in model.ops if op.kind == "layer_norm")
    arguments = (("input", Ref("x")), *norm.arguments[1:])
    mask = replace(norm, name="mask", inputs=("x",), arguments=arguments, differentiable=(False,))
    last = model.blocks[-1]
    model = replace(
        model,
        ops=(*model.ops[: last.start], mask, *model.ops[last.start :]),
        blocks=(*model.blocks[:-1], replace(last, stop=last.stop + 1)),
    )
    made = sharded_stage(*costs_of(model, (0.6, 0.6)), (1, 1))
    assert "mask" not in made.sharding.strategies
    assert made.together_s("F", SAMPLES)[0] > 0


def test_slower_links_and_more_latency_cost_what_they_take() -> None:
    link = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e6, latency_s=1e-3)
    costs, ids = costs_of(transformer(), (0.6, 0.6), link=link)
    made = sharded_stage(costs, ids, (1, 1))
    free = sharded_stage(*_with_free_links(costs), (1, 1))
    for kind in ("F", "B"):
        seconds, exchanged = made.together_s(kind, SAMPLES)
        plain, _ = free.together_s(kind, SAMPLES)
        assert seconds == pytest.approx(plain + exchanged)
        sent = [m.forward if kind == "F" else m.backward for _, m in made.line(SAMPLES)]
        assert exchanged == pytest.approx(sum(sum(made.wires.divided(each)) for each in sent))
        assert exchanged >= 1e-3 * sum(map(len, sent))


def test_copies_on_both_sides_of_an_exchange_take_what_the_memory_of_a_device_takes() -> None:
    """As its optimizer shows: AdamW moves each byte of the parameters 7 times."""
    still, ids = costs_of(transformer(), (0.6, 0.6))
    moving, _ = costs_of(transformer(), (0.6, 0.6), optimizer_s=0.2)
    assert sharded_stage(moving, ids, (1, 1)).wires.copies_s_per_byte == pytest.approx(
        (0.2 / 7 / still.graph.trainable_bytes,) * 2
    )
    assert sharded_stage(moving, ids, (1, 1)).together_s("F", SAMPLES) > sharded_stage(still, ids, (1, 1)).together_s(
        "F", SAMPLES
    )


def _with_free_links(costs: CostModel) -> tuple[CostModel, tuple[str, ...]]:
    machines = replace(costs.cluster, links=cluster(2).links)
    return replace(costs, cluster=machines), tuple(device.id for device in machines.devices)


def test_the_second_half_of_a_backward_needs_nobody() -> None:
    costs, ids = costs_of(transformer(), (0.3, 0.6))
    made = costs.of(planned(costs, stage(costs.graph, "split", ids, (1, 1))))
    slow, fast = stage_costs(made, 1), stage_costs(made, 0)
    assert slow.input_s == fast.input_s
    assert slow.weight_s == pytest.approx([2 * seconds for seconds in fast.weight_s])
    assert slow.together == fast.together == (0, 1)


def test_what_is_computed_again_is_exchanged_again() -> None:
    link = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e6, latency_s=1e-3)
    costs, ids = costs_of(transformer(), (0.6, 0.6), link=link)
    kept, again = (
        stage_costs(costs.of(planned(costs, stage(costs.graph, "split", ids, (1, 1), recompute=blocks))), 0)
        for blocks in ((), (1, 2))
    )
    made = sharded_stage(costs, ids, (1, 1))
    seconds = [made.together_s("F", SAMPLES, (b.start, b.stop)) for b in costs.graph.blocks[1:3]]
    assert kept.recompute_s == (0.0,)
    assert again.recompute_s == pytest.approx((sum(s for s, _ in seconds),))
    assert again.exchanges is not None
    assert again.exchanges.recompute_s == pytest.approx((sum(e for _, e in seconds),))
    assert again.exchanges.recompute_s[0] > 0
    assert again.kept_bytes[0] < kept.kept_bytes[0]
    assert again.recomputed_bytes[0] == 2 * again.redone_bytes[0] > 0


@pytest.mark.parametrize("members", [2, 3, 4])
def test_a_block_keeps_four_tensors_whole_and_thirteen_in_parts(members: int) -> None:
    """Whole: what both norms and what the layers behind them read. In parts: queries, keys, values, what attention makes of them and that
    as the next layer reads it; and twice the inner width, which is four times as wide."""

    def kept(layers: int) -> int:
        costs, ids = costs_of(transformer(layers), (0.6,) * members)
        return stage_costs(costs.of(planned(costs, stage(costs.graph, "split", ids, (1,) * members))), 0).kept_bytes[0]

    assert kept(3) - kept(2) == pytest.approx(SAMPLES * HIDDEN_BYTES * (4 + 13 / members), abs=2)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_falls_as_widths_shrink(kind: str) -> None:
    model = transformer(moves=True)
    costs, ids = costs_of(model, (0.6,) * 4)
    peaks, fixed = [], []
    for members in (1, 2, 3, 4):
        made = costs.of(planned(costs, stage(model, kind, ids[:members], (1,) * members)))
        own = made.ranks[0]
        assert own is not None
        fixed.append(own.fixed_bytes)
        peaks.append(own.stages[0].kept_bytes[0])
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.75 * peaks[0]
    if kind == "split":
        assert fixed == sorted(fixed, reverse=True)
        assert fixed[-1] == pytest.approx(fixed[0] / 4)
    else:
        assert fixed == [fixed[0]] * 4  # each has all weights


def test_what_was_measured_shrinks_as_the_graph_says() -> None:
    costs, ids = costs_of(transformer(), (0.6, 0.6), saved=1000)
    shrunk = stage_costs(costs.of(planned(costs, stage(costs.graph, "split", ids, (1, 1)))), 0).kept_bytes[0]
    first, *layers, last = costs.graph.blocks
    assert len(layers) == 2
    # The first layer keeps its input, which is whole; the sum keeps nothing that the graph knows of, so all that was measured counts.
    assert shrunk == pytest.approx(SAMPLES * 1000 * (1 + 2 * (4 + 13 / 2) / 17 + 1), rel=0.01)
    assert (first.kind, last.kind) == ("first", "last")


def test_a_member_holds_and_updates_its_boxes_alone() -> None:
    model = transformer()
    costs, ids = costs_of(model, (0.6, 0.6), optimizer_s=0.2)
    made = costs.of(planned(costs, stage(model, "split", ids, (2, 1))))
    whole = costs.update_s(ids[0])
    own = [rank for rank in made.ranks if rank is not None]
    assert [rank.step_s for rank in own] == pytest.approx([whole * 2 / 3, whole / 3])
    assert set(made.reduce_s) == {0.0}  # nobody else has the same
    boxes = PlannedWeights.of(planned(costs, stage(model, "split", ids, (2, 1))), model).boxes
    use = costs.memory_use(ids[0], 0, [(0, len(model.ops))], boxes[ids[0]])
    assert use.parameters == use.gradients == pytest.approx(model.parameter_bytes * 2 / 3)


def test_weights_that_all_members_have_are_summed_over_them() -> None:
    model = transformer()
    costs, ids = costs_of(model, (0.6, 0.6), link=Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e6, latency_s=0.0))
    made = costs.of(planned(costs, stage(model, "context", ids, (1, 1))))
    assert min(made.reduce_s) > 0
    own = made.ranks[0]
    assert own is not None
    assert own.ready[0][0][1] <= 1


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(KINDS),
    st.lists(st.sampled_from([3, 6, 12]), min_size=1, max_size=4).map(tuple),
    st.sampled_from(["1F1B", "GPipe", "ZBH1"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_a_stage_in_parts_in_a_pipeline(
    shares: tuple[int, ...], kind: str, sizes: tuple[int, ...], schedule: str, again: bool
) -> None:
    """Lowered and played: a step is no shorter than its bound, and who works together is together."""
    model = transformer(moves=True)
    link = Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e6, latency_s=1e-3)
    costs, ids = costs_of(model, (0.6, 0.3, 0.4, 0.2), link=link)
    cut = model.blocks[2].start
    stages = (
        stage(model, kind, ids[:2], shares, ops=(0, cut), recompute=(1,) if again else ()),
        Stage(ops=(cut, len(model.ops)), devices=ids[2:3], regions=(Region(layout=Layout(shares=(1,))),)),
    )
    plan = planned(costs, *stages, sizes=sizes).model_copy(update={"schedule": schedule})
    made = costs.of(plan)
    played = simulate(lower(plan, model, costs.cluster).program, made)
    assert played.step_s >= made.lower_bound_s - 1e-9
    assert played.exchange_s[0] == played.exchange_s[1] > 0
    assert played.exchange_s[2:] == (0.0, 0.0)
    spans = {(s.rank, s.step, s.action): (s.start_s, s.end_s) for s in played.spans if s.lane == "compute"}
    for (rank, step, action), when in spans.items():
        if rank == 0 and action.kind in ("F", "B", "I", "R"):
            assert spans[1, step, action] == when
    assert all(peak > 0 for peak in played.peak_bytes[:3])
