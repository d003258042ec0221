"""Stages whose devices share layers, sequences, micro-batches and experts: the ways there are, what is exchanged, what only they can."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.errors import InfeasibleError
from heterodyne.predictor.layer_costs import predicted_layers
from heterodyne.predictor.transformer import Transformer
from heterodyne.search.fleet.kinds import kinds_of, usable_widths
from heterodyne.search.fleet.plan import Candidate, Template, TemplateStage, mix_of
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.ring_network import RingNetwork
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.stage_tables import StageSums
from pure.search.fleet.exhaustive import Exhaustive
from pure.search.fleet.small import GIB, Drawn, drawn, search_of

INSIDE = Wire(bandwidth_bytes_per_s=200e9, latency_s=0.0)
BETWEEN = Wire(bandwidth_bytes_per_s=10e9, latency_s=0.0)


def _step_s(weighed: Candidate) -> float:
    return weighed.predicted.step_s


def _pool(kind: str, nodes: int, *, per_node: int = 2, memory: float = 24.0) -> Pool:
    return Pool(
        name=kind, kind=kind, nodes=nodes, devices_per_node=per_node, memory_bytes=int(memory * GIB), inside=INSIDE,
        between=BETWEEN,
    )  # fmt: skip


def _costs(**changed: object) -> Drawn:
    costs = Drawn(
        layers=("embedding", *["block"] * 8, "head"), speed={"fast": 4.0, "slow": 2.0}, fixed_s=0.0, lost=0.6, backward=2.0,
        head=0.5, kept=0.1, weights=0.1, ways=3,
    )  # fmt: skip
    return replace(costs, **changed)  # type: ignore[arg-type]


def test_with_every_way_to_share_it_is_nearly_always_the_best_plan_there_is() -> None:
    longer = []
    for devices, blocks in ((3, 4), (4, 2), (4, 3)):
        for number in range(5):
            fleet, costs, samples = drawn(random.Random(number), devices=devices, blocks=blocks, ways=3)
            search = search_of(fleet, costs, samples)
            best = search.run()
            known_s = float("inf") if best is None else _step_s(best)
            shortest_s = Exhaustive(search=search_of(fleet, costs, samples), known_s=known_s).shortest_s()
            if best is None:
                assert shortest_s == float("inf")
            else:
                longer.append(known_s / shortest_s - 1)
                assert search.pool.bound_s <= shortest_s * (1 + 1e-9)
    assert max(longer) <= 0.01
    assert sum(value <= 1e-9 for value in longer) >= 0.9 * len(longer)


def test_no_plan_is_lost_with_kinds_that_others_are_better_than() -> None:
    left_out = 0
    for number in range(8):
        fleet, costs, samples = drawn(random.Random(number), devices=3, blocks=2, ways=3)
        for space in (Space(), Space(micro_batches=(2,))):
            few, every = (
                Exhaustive(search=search_of(fleet, costs, samples, space), every_kind=flag).shortest_s()
                for flag in (False, True)
            )
            assert few == pytest.approx(every, rel=1e-12)
        search = search_of(fleet, costs, samples)
        for size in search.kinds.sizes:
            some = kinds_of(fleet, search.tables, size, Space())
            left_out += len(kinds_of(fleet, search.tables, size, Space(), every=True)) - len(some)
    assert left_out > 0


def test_stages_may_have_whole_nodes_but_layers_are_in_parts_inside_one() -> None:
    widths = tuple(
        Widths(*own) for own in ((1, 1, 1), (4, 1, 1), (4, 4, 1), (8, 2, 1), (16, 1, 1), (1, 12, 1), (1, 1, 32))
    )
    assert usable_widths(widths, 8) == tuple(own for own in widths if own.tensor <= 8 and own.devices != 12)
    assert usable_widths(widths, 6) == ((1, 1, 1), (1, 12, 1))


def _synced(template: Template, count: int, fleet: Fleet, costs: Drawn) -> tuple[float, float, float]:
    """Seconds, and the bytes of one copy of what is no expert's and of one set of experts."""
    search = search_of(fleet, costs, 64)
    (table,) = search.predictor.stage_tables.of(template)
    exchanges = RingNetwork(fleet).exchanges([(template, count)], {template: StageSums(template, [table])}, "stages")
    experts = sum(cost.expert_bytes * table.widths.devices / cost.expert_copies for cost in table.costs)
    return float(exchanges.of[template].reduced_s[0]), table.reduced_bytes(0, 10) - experts, experts


@pytest.mark.parametrize("widths", [(1, 1, 2), (1, 2, 1)])
def test_copies_in_a_stage_meet_like_replicas(widths: tuple[int, int, int]) -> None:
    fleet = Fleet(name="f", pools=(_pool("fast", 4),))
    tensor, context, data = widths
    shared = Template(
        micro_batch=2, stages=(TemplateStage(pool="fast", widths=Widths(tensor, context, data), start=0, stop=10),)
    )
    one = Template(micro_batch=1, stages=(TemplateStage(pool="fast", start=0, stop=10),))
    for count in (1, 2, 4):
        seconds, dense, _ = _synced(shared, count, fleet, _costs())
        assert seconds == pytest.approx(_synced(one, 2 * count, fleet, _costs())[0])
        members = 2 * count
        slowest = 200e9 if count == 1 else 10e9
        assert seconds == pytest.approx(2 * (members - 1) / members * dense / slowest)


def test_experts_meet_those_of_other_stages_only() -> None:
    fleet = Fleet(name="f", pools=(_pool("fast", 4),))
    template = Template(micro_batch=2, stages=(TemplateStage(pool="fast", widths=Widths(data=2), start=0, stop=10),))
    seconds, dense, experts = _synced(template, 1, fleet, _costs(experts=0.5))
    assert experts > 0
    assert seconds == pytest.approx(dense / 200e9)
    seconds, dense, experts = _synced(template, 4, fleet, _costs(experts=0.5))
    assert seconds == pytest.approx(2 * (7 / 8 * dense + 3 / 4 * experts) / 10e9)


def test_experts_over_two_nodes_send_half_of_a_set_from_each() -> None:
    fleet = Fleet(name="f", pools=(_pool("fast", 4, per_node=1),))
    template = Template(micro_batch=2, stages=(TemplateStage(pool="fast", widths=Widths(data=2), start=0, stop=10),))
    for count in (1, 2):
        seconds, dense, experts = _synced(template, count, fleet, _costs(experts=0.5))
        ring = 2 * (2 * count - 1) / (2 * count) * dense + 2 * (count - 1) / count * experts / 2
        assert seconds == pytest.approx(ring / 10e9)


def test_what_crosses_between_stages_goes_side_by_side_as_far_as_both_have_parts() -> None:
    fleet = Fleet(name="f", pools=(_pool("fast", 1, per_node=4),))
    rings = RingNetwork(fleet)

    def send_s(first: int, second: int) -> float:
        stages = (
            TemplateStage(pool="fast", widths=Widths(data=first), start=0, stop=5),
            TemplateStage(pool="fast", widths=Widths(data=second), start=5, stop=10),
        )
        return rings.send_s(Template(micro_batch=2, stages=stages), 0, 1e9, "stages")

    assert send_s(1, 1) == send_s(1, 2) == send_s(2, 1) == pytest.approx(1e9 / 200e9)
    assert send_s(2, 2) == pytest.approx(send_s(1, 1) / 2)


def test_two_slow_devices_share_what_one_fast_device_does() -> None:
    """Of a stage on one fast device and one on two slow ones, halves of a micro-batch take each slow one as long as the whole the fast."""
    fleet = Fleet(
        name="f",
        pools=tuple(
            replace(_pool(kind, nodes, per_node=1, memory=15), inside=None)
            for kind, nodes in (("fast", 1), ("slow", 2))
        ),
        links={("fast", "slow"): Wire(bandwidth_bytes_per_s=1e12, latency_s=0.0)},
    )
    # One after the other the slow ones cannot have half of what the fast one has not: there are two blocks.
    layers = ("embedding", "block", "block", "head")
    memory = _costs(layers=layers, weights=1.0, kept=0.001, ways=2)  # 24 GiB, so that no device holds the model
    planned = FleetPlanner(fleet=fleet, costs=memory, global_batch=64).plan(space=Space(recompute=False, zero=(0,)))
    without = FleetPlanner(fleet=fleet, costs=memory, global_batch=64).plan(
        space=Space(recompute=False, zero=(0,), max_data=1, max_context=1)
    )
    assert _step_s(planned.best) < _step_s(without.best)
    (group,) = planned.best.plan.groups
    assert {(stage.pool, stage.widths.data) for stage in group.template.stages} == {("fast", 1), ("slow", 2)}


def _on_a100s(nodes: int, memory: int = 70 * 10**9) -> Fleet:
    wire = Wire(bandwidth_bytes_per_s=50e9, latency_s=5e-6)
    pool = Pool(
        name="a", kind="A100-SXM-80GB", nodes=nodes, devices_per_node=8, memory_bytes=memory, inside=Wire(
            bandwidth_bytes_per_s=300e9, latency_s=5e-6), between=wire,
    )  # fmt: skip
    return Fleet(name="a100", pools=(pool,))


def test_a_sequence_that_no_device_holds_is_planned_with_its_parts() -> None:
    long = Transformer(layers=8, hidden=4096, heads=32, kv_heads=4, vocab=32000, seq=2**19, ffn=14336, gated=True)
    fleet = _on_a100s(8, memory=30 * 10**9)  # logits of four tensor-parallel devices are 42 GB on each
    planner = FleetPlanner(fleet=fleet, costs=predicted_layers(long, fleet), global_batch=2)
    plan = planner.plan().best.plan
    assert all(stage.widths.context > 1 for group in plan.groups for stage in group.template.stages)
    with pytest.raises(InfeasibleError):
        planner.plan(space=Space(max_context=1))


def test_experts_that_no_node_holds_are_planned_over_several() -> None:
    """Two layers of 64 experts have 12.5e9 parameters: of 18 bytes each a device of one node would hold 28 GB, one of two nodes 14."""
    routed = Transformer(layers=2, hidden=4096, heads=32, vocab=32000, seq=2048, ffn=11900, experts=64, topk=2)
    fleet = _on_a100s(2, memory=20 * 10**9)
    planner = FleetPlanner(fleet=fleet, costs=predicted_layers(routed, fleet), global_batch=64)
    (group,) = planner.plan(space=Space(max_stages=1)).best.plan.groups
    (stage,) = group.template.stages
    assert stage.devices == 16
    assert planner.search(Space()).predictor.stage_tables.expert_width(group.template, 0) == 16


def test_only_what_runs_is_planned_to_run() -> None:
    fleet = Fleet(name="f", pools=(_pool("fast", 2, per_node=4), _pool("slow", 2)))
    costs = _Wide(costs=_costs())
    search = search_of(fleet, costs, 64)  # type: ignore[arg-type]
    for experts in (0.0, 0.5):
        table = search_of(fleet, _Wide(costs=_costs(experts=experts)), 64).tables  # type: ignore[arg-type]
        every, some = (
            kinds_of(fleet, table, 4, Space(runnable=runs, few_devices=fleet.devices)) for runs in (False, True)
        )
        assert any(sum(width > 1 for width in kind.widths) > 1 for kind in every)
        assert all(kind.widths.copies == 1 for kind in some) == (experts > 0)
    assert search.evaluate(mix_of([])) is None


class _Wide:
    """Drawn costs with a stage of four devices that share layers and micro-batches."""

    def __init__(self, costs: Drawn) -> None:
        self._costs = costs
        self.layers = costs.layers

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        return (*self._costs.widths(device_kind), Widths(tensor=2, data=2))

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        if widths.devices < 4:
            return self._costs.cost(device_kind, layer_kind, widths, micro_batch)
        half = self._costs.cost(device_kind, layer_kind, Widths(tensor=2), micro_batch // 2)
        return None if half is None or micro_batch % 2 else half.beside(2)
