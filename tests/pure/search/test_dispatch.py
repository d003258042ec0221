"""Tokens go once to each host where the link between hosts is slow, and what is chosen is what is simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cluster import Link
from heterodyne.cluster.profile import LinkSample
from heterodyne.cost.expert_rounds import MixtureRows, direct, hierarchical
from heterodyne.cost.model import CostModel
from heterodyne.graph import Block, Input, Loss, ModelGraph, Op, Parameter, Ref, Size, TensorSpec
from heterodyne.graph.ir import Argument
from heterodyne.graph.size import ZERO
from heterodyne.graph.task_graphs import TaskGraph
from heterodyne.plan import Axis, Layout, MicroBatches, Pipeline, Plan, Region, Stage
from heterodyne.plan.check import violations
from heterodyne.plan.lower import lower
from heterodyne.plan.mesh import Kind
from heterodyne.plan.plan import Exchange
from heterodyne.search.dispatch import with_cheaper_dispatch
from heterodyne.search.explain import paragraph
from heterodyne.search.planner import plan
from heterodyne.search.predict import plan_of
from heterodyne.sim import simulate
from pure.build import cluster, linear, profile

WIDTH, INNER, EXPERTS, CHOICES, TOKENS = 64, 16, 8, 2, 1024
KINDS: tuple[Kind, Kind] = ("replicate", "split")
PER_TOKEN = (Size.per_sample(1), Size.of(WIDTH))


def op(kind: str, arguments: dict[str, Argument], shape: tuple[Size, ...], weights: tuple[str, ...]) -> Op:
    read = [value.name for value in arguments.values() if isinstance(value, Ref)]
    return Op(
        name=f"the_{kind}",
        target=f"heterodyne.{kind}.default" if kind == "experts" else f"aten.{kind}.default",
        inputs=tuple(name for name in read if name not in weights),
        parameters=tuple(name for name in read if name in weights),
        outputs=(TensorSpec(shape=shape, dtype="float32"),),
        differentiable=(True,),
        module="",
        source="model.py:1",
        flops_forward=Size.per_sample(WIDTH * INNER),
        flops_backward=Size.per_sample(2 * WIDTH * INNER),
        bytes_read=ZERO,
        bytes_written=ZERO,
        bytes_saved=ZERO,
        annotation="experts" if kind == "experts" else None,
        arguments=tuple(arguments.items()),
        samples=(0 if shape else None,),
    )


def mixture() -> ModelGraph:
    """A linear layer, a mixture and a sum; a sample is a token, and brings its choices along."""
    shapes = {"w": (WIDTH, WIDTH), "gate_up": (EXPERTS, 2 * INNER, WIDTH), "down": (EXPERTS, WIDTH, INNER)}
    weights = tuple(shapes)
    chosen = {"x": (PER_TOKEN, "float32")} | {
        name: ((Size.per_sample(1), Size.of(CHOICES)), dtype) for name, dtype in (("e", "int64"), ("p", "float32"))
    }
    ops = (
        op("linear", {"input": Ref("x"), "weight": Ref("w"), "bias": None}, PER_TOKEN, weights),
        op(
            "experts",
            {name: Ref(of) for name, of in zip(
                ("tokens", "indices", "weights", "gate_up", "down"), ("the_linear", "e", "p", "gate_up", "down"), strict=True
            )} | {"activation": "silu"},
            PER_TOKEN,
            weights,
        ),
        op("sum", {"self": Ref("the_experts")}, (), weights),
    )  # fmt: skip
    return ModelGraph(
        name="Mixture",
        inputs=tuple(
            Input(name=name, spec=TensorSpec(shape=shape, dtype=dtype), batch_dim=0)
            for name, (shape, dtype) in chosen.items()
        ),
        parameters=tuple(
            Parameter(name=name, shape=shape, dtype="float32", trainable=True) for name, shape in shapes.items()
        ),
        buffers=(),
        ops=ops,
        blocks=(Block(index=0, name="all", kind="all", start=0, stop=len(ops)),),
        loss=Loss(reduction="sum"),
        output=Ref("the_sum"),
    )


def model_of(between: float, *, met: bool = False, devices: int = 4, nodes: int = 2) -> CostModel:
    """``between``: bytes a second between nodes; ``met``: exchanges of all devices were measured, and are as slow as that link."""
    machines = cluster(devices, nodes=nodes)
    ends = [f"n{i}" for i in range(nodes)]
    links = [
        Link(between=(a, b), bandwidth_bytes_per_s=1e9 if a == b else between, latency_s=1e-4)
        for number, a in enumerate(ends)
        for b in ends[number:]
    ]
    machines = replace(machines, links=tuple(links))
    graph = mixture()
    measured = profile(graph, machines, [linear(1e-6)] * devices)
    if met:
        ids = tuple(device.id for device in machines.devices)
        pairs = devices // nodes * (devices - devices // nodes)  # share a link, in each direction
        samples = [
            LinkSample(op="exchange", devices=ids, bytes=size, seconds=1e-4 + pairs * size / between, spread=0.0)
            for size in (1000, 100_000)
        ]
        measured = replace(measured, links=tuple(samples))
    return CostModel(graph=graph, cluster=machines, profile=measured)


def pipeline_of(model: CostModel, layout: Layout, experts: Layout, **changes: object) -> Pipeline:
    stage = Stage(
        ops=(0, len(model.graph.ops)),
        devices=tuple(device.id for device in model.cluster.devices),
        regions=(Region(layout=layout), Region(task_graph="experts", layout=experts)),
        exchange=Exchange(latency_bytes=0, flops_per_byte=1),
    ).model_copy(update=changes)
    return Pipeline(micro_batches=MicroBatches((TOKENS,)), stages=(stage,))


def over_all(model: CostModel, **changes: object) -> Pipeline:
    shares = (1,) * len(model.cluster.devices)
    return pipeline_of(model, Layout(shares=shares), Layout(kind="split", shares=shares), **changes)


def step_s(model: CostModel, plan: Plan) -> float:
    lowered = lower(plan, model.graph, model.cluster)
    return simulate(lowered.program, model.of(plan, lowered.weights)).step_s


def exchanged_s(model: CostModel, pipeline: Pipeline) -> float:
    cost = model.sharded_stage(pipeline, 0)
    assert cost is not None
    return sum(cost.together_s(kind, TOKENS)[1] for kind in ("F", "B"))


@pytest.mark.parametrize("met", [False, True])
@pytest.mark.parametrize(("between", "once"), [(1e7, True), (1e9, False)])
def test_the_link_between_hosts_decides(between: float, once: bool, met: bool) -> None:
    model = model_of(between, met=met)
    chosen = with_cheaper_dispatch(model, over_all(model))
    assert chosen.stages[0].hierarchical is once
    assert with_cheaper_dispatch(model, chosen) == chosen
    plans = [plan_of(model, TOKENS, (over_all(model, hierarchical=each),)) for each in (once, not once)]
    assert violations(plans[0], model.graph, model.cluster) == ()
    simulated = [step_s(model, plan) for plan in plans]
    assert simulated[0] < simulated[1]


@pytest.mark.parametrize(("between", "once"), [(1e7, True), (1e9, False)])
def test_the_planner_chooses_and_tells(between: float, once: bool) -> None:
    model = model_of(between)
    marked = replace(model.graph, task_graphs=(TaskGraph(name="experts", kind="split", device_count=4),))
    found = plan(marked, model.cluster, model.profile, global_batch_size=TOKENS, micro_batch_sizes=(TOKENS,))
    assert found.plan.pipelines[0].stages[0].hierarchical is once
    assert ("once to each host" in paragraph(found)) is once


def test_a_stage_exchanges_what_its_mixture_does() -> None:
    """The link carries what crosses, in both directions at once; inside and for counts there are only latencies, and next to nothing."""
    model = model_of(1e6)
    rows = MixtureRows(
        tokens=(TOKENS // 4,) * 4,
        experts=(EXPERTS // 4,) * 4,
        choices=CHOICES,
        row_bytes=4 * WIDTH,
        weight_bytes=4,
    )
    hosts = (0, 1, 0, 1)
    ways = [exchanged_s(model, over_all(model, hierarchical=each)) for each in (False, True)]
    for found, (forward, backward) in zip(ways, (direct(rows), hierarchical(rows, hosts)), strict=True):
        expected = sum(
            sum(size for i, row in enumerate(sent) for j, size in enumerate(row) if hosts[i] == 0 and hosts[j] == 1)
            for sent in (*forward, *backward)
        )
        assert found == pytest.approx(expected / 1e6, rel=0.02)


def test_rows_on_one_host_each_send_directly() -> None:
    """A mesh whose rows are the devices of a host: along the axis of the experts nothing leaves it."""
    model = model_of(1e6)
    ids = [device.id for device in model.cluster.devices]
    by_host = (ids[0], ids[2], ids[1], ids[3])
    layouts = [Layout(shares=(1, 1), inner=(Axis(kind=kind, shares=(1, 1)),)) for kind in ("replicate", "split")]
    ways = [
        exchanged_s(model, pipeline_of(model, *layouts, devices=by_host, hierarchical=each)) for each in (False, True)
    ]
    assert ways[0] == pytest.approx(ways[1])


def test_groups_of_a_mesh_are_on_hosts_of_their_own() -> None:
    """Tokens go to experts along the outer axis, in two groups with two devices on each host; or with all four on one."""
    model = model_of(1e6, devices=8)
    ids = [device.id for device in model.cluster.devices]
    layouts = [Layout(kind=kind, shares=(1,) * 4, inner=(Axis(kind="split", shares=(1, 1)),)) for kind in KINDS]
    for devices, alike in (((*ids[::2], *ids[1::2]), False), (ids, True)):
        ways = [
            exchanged_s(model, pipeline_of(model, *layouts, devices=tuple(devices), hierarchical=each))
            for each in (False, True)
        ]
        assert (ways[1] < ways[0]) is not alike
        assert (ways[1] == pytest.approx(ways[0])) is alike


def test_without_mixtures_or_hosts_there_is_nothing_to_choose() -> None:
    model = model_of(1e6, nodes=1)
    assert not with_cheaper_dispatch(model, over_all(model, hierarchical=True)).stages[0].hierarchical
