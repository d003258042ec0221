"""What a search over kinds of devices finds, the plan that is written of it, and the one that runs are the same plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cluster.fleet_cluster import cluster_of
from heterodyne.cost.layers import Widths
from heterodyne.errors import PlanError
from heterodyne.graph import ModelGraph
from heterodyne.plan import Plan
from heterodyne.plan.bind import bind
from heterodyne.plan.check import require_valid, violations
from heterodyne.plan.lower import lower
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.search.fleet.plan import INTERLEAVED, ScheduleName, Template, TemplateGroup, TemplatePlan, TemplateStage
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.written import written_plan
from pure.build import cluster, graph

MODEL = graph(6)  # an embedding, six layers, a head
LINK = Wire(bandwidth_bytes_per_s=1e10, latency_s=1e-5)
FLEET = Fleet(
    name="two",
    pools=tuple(
        Pool(
            name=name, kind=kind, nodes=2, devices_per_node=4, memory_bytes=2**36, inside=LINK, between=LINK, place=(name,)
        )
        for name, kind in (("new", "A100-SXM-80GB"), ("old", "V100-SXM2-32GB"))
    ),
    links={("new", "old"): LINK},
)  # fmt: skip
CLUSTER = cluster_of(FLEET)


def bound(asked: TemplatePlan, model: ModelGraph = MODEL) -> Plan:
    """Through the file that it is written to."""
    made = written_plan(asked, FLEET)
    assert Plan.parse(made.dump()) == made
    assert not made.bound
    on_devices = bind(made, model, CLUSTER)
    assert on_devices.bound
    return on_devices


def plan(
    cuts: list[int],
    pools: list[str],
    *,
    replicas: int,
    count: int,
    micro_batch: int,
    missing: int,
    layout: str,
    again: bool,
) -> TemplatePlan:
    ends = [0, *cuts, len(MODEL.blocks)]
    stages = tuple(
        TemplateStage(pool=pool, start=start, stop=stop, recompute=again and number == 0)
        for number, (pool, start, stop) in enumerate(zip(pools, ends[:-1], ends[1:], strict=True))
    )
    group = TemplateGroup(
        template=Template(micro_batch=micro_batch, stages=stages), replicas=replicas, num_microbatches=count
    )
    return TemplatePlan(groups=(group,), global_batch=group.capacity - missing, layout=layout, zero=0)  # type: ignore[arg-type]


@given(
    cuts=st.lists(st.integers(1, 7), max_size=3, unique=True).map(sorted),
    replicas=st.integers(1, 2),
    count=st.integers(2, 5),
    micro_batch=st.integers(1, 3),
    layout=st.sampled_from(["stages", "pipelines"]),
    again=st.booleans(),
    data=st.data(),
)
def test_every_sample_and_every_layer_is_there_once(
    cuts: list[int], replicas: int, count: int, micro_batch: int, layout: str, again: bool, data: st.DataObject
) -> None:
    pools = data.draw(st.lists(st.sampled_from(["new", "old"]), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    missing = data.draw(st.integers(0, micro_batch - 1))
    asked = plan(
        cuts,
        pools,
        replicas=replicas,
        count=count,
        micro_batch=micro_batch,
        missing=missing,
        layout=layout,
        again=again,
    )
    made = bound(asked)
    assert violations(made, MODEL, CLUSTER) == ()
    assert sum(pipeline.micro_batches.samples for pipeline in made.pipelines) == asked.global_batch
    assert [stage.ops[0] for stage in made.pipelines[0].stages] == [MODEL.blocks[b].start for b in (0, *cuts)]
    for pipeline in made.pipelines:
        kinds = [CLUSTER.device(stage.devices[0]).kind for stage in pipeline.stages]
        assert kinds == [FLEET.pool(pool).kind for pool in pools]
    used = [device for pipeline in made.pipelines for stage in pipeline.stages for device in stage.devices]
    assert len(used) == len(set(used))
    assert set(used) | set(made.idle) == {device.id for device in CLUSTER.devices}


def test_replicas_of_a_stage_or_the_stages_of_a_pipeline_share_a_node() -> None:
    common = {"replicas": 2, "count": 2, "micro_batch": 1, "missing": 0, "again": False}
    together = bound(plan([3], ["new", "new"], layout="pipelines", **common))  # type: ignore[arg-type]
    beside = bound(plan([3], ["new", "new"], layout="stages", **common))  # type: ignore[arg-type]
    ranks = [[CLUSTER.rank(s.devices[0]) for s in p.stages] for p in together.pipelines]
    assert ranks == [[0, 1], [2, 3]]
    assert [[CLUSTER.rank(s.devices[0]) for s in p.stages] for p in beside.pipelines] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("shared", "way"),
    [({"data": 2}, "replicate"), ({"data": 8}, "replicate"), ({"tensor": 2}, "split"), ({"context": 2}, "context")],
)
def test_devices_of_a_stage_share_it_in_the_way_of_the_plan(shared: dict[str, int], way: str) -> None:
    asked = plan([3], ["new", "old"], replicas=1, count=2, micro_batch=8, missing=0, layout="stages", again=False)
    first, second = asked.groups[0].template.stages
    template = replace(asked.groups[0].template, stages=(replace(first, widths=Widths(**shared)), second))
    wide = replace(asked, groups=(replace(asked.groups[0], template=template),))
    made = bound(wide)
    if way == "replicate":  # what lies in parts depends on the model
        assert violations(made, MODEL, CLUSTER) == ()
    stage = made.pipelines[0].stages[0]
    assert len(stage.devices) == template.stages[0].devices
    assert stage.regions[0].layout.kind == way


@pytest.mark.parametrize(("data", "context", "width"), [(2, 1, 2), (2, 1, 4), (1, 2, 2), (2, 2, 2)])
def test_a_stage_that_shares_its_work_in_several_ways_is_a_mesh(data: int, context: int, width: int) -> None:
    """Rows of data parallelism outermost, tensor parallelism among the devices that are nearest to each other."""
    asked = plan([3], ["new", "old"], replicas=1, count=2, micro_batch=8, missing=0, layout="stages", again=False)
    first, second = asked.groups[0].template.stages
    both = replace(first, widths=Widths(width, context, data))
    template = replace(asked.groups[0].template, stages=(both, second))
    made = bound(replace(asked, groups=(replace(asked.groups[0], template=template),)))
    stage = made.pipelines[0].stages[0]
    axes = stage.regions[0].layout.axes
    wanted = [("replicate", data), ("context", context), ("split", width)]
    assert [(axis.kind, len(axis.shares)) for axis in axes] == [entry for entry in wanted if entry[1] > 1]
    assert stage.rows == tuple(
        stage.devices[n::1][: width * context] for n in range(0, len(stage.devices), width * context)
    )


def test_another_model_and_too_many_stages_are_refused() -> None:
    asked = plan([3], ["new", "new"], replicas=1, count=2, micro_batch=1, missing=0, layout="stages", again=False)
    with pytest.raises(PlanError, match="for 8 blocks, and model Chain has 6"):
        bound(asked, graph(4))
    wide = replace(asked.groups[0].template.stages[0], widths=Widths(16))
    template = replace(asked.groups[0].template, stages=(wide, asked.groups[0].template.stages[1]))
    (sentence,) = violations(bound(replace(asked, zero=3)), MODEL, CLUSTER)
    assert "and no two devices do: leave 'zero' out" in sentence
    with pytest.raises(
        PlanError,
        match=r"16 devices of kind A100-SXM-80GB of new in one node, or for whole nodes .* have 4, 4 left",
    ):
        bound(replace(asked, groups=(replace(asked.groups[0], template=template),)))


def test_a_plan_is_bound_to_whatever_nodes_have_such_devices() -> None:
    """The pools of a fleet need not be called as the machines are."""
    made = written_plan(
        plan([3], ["new", "old"], replicas=2, count=2, micro_batch=1, missing=0, layout="stages", again=False), FLEET
    )
    renamed = replace(
        FLEET,
        pools=tuple(replace(p, name=f"rack{i}", place=()) for i, p in enumerate(FLEET.pools)),
        links={("rack0", "rack1"): LINK},
    )
    own = bind(made, MODEL, cluster_of(renamed))
    assert violations(own, MODEL, cluster_of(renamed)) == ()
    assert all(device.startswith("rack0-0/A100") for device in own.pipelines[0].stages[0].devices)
    with pytest.raises(PlanError, match="the cluster has cpu"):
        bind(made, MODEL, cluster(4))


def test_a_plan_of_many_devices_is_a_screenful() -> None:
    group = plan(
        [3], ["new", "old"], replicas=2, count=2, micro_batch=1, missing=0, layout="stages", again=True
    ).groups[0]
    many = TemplatePlan(groups=(replace(group, replicas=10_000),), global_batch=39_999, zero=0)
    made = written_plan(many, FLEET)
    assert [p.replicas for p in made.pipelines] == [9_999, 1]
    assert len(made.dump().splitlines()) < 60


@pytest.mark.parametrize("layout", ["stages", "pipelines"])
@pytest.mark.parametrize("schedule", Space().schedules)
def test_the_program_of_a_plan_is_its_schedule(schedule: ScheduleName, layout: str) -> None:
    """What each rank computes is what the schedule has its place do, wherever the stages of the place are in the model."""
    chunks = 2 if schedule in INTERLEAVED else 1
    pools = ["new", "old"] * chunks
    asked = plan(
        [2, 3, 5][: 2 * chunks - 1], pools, replicas=2, count=4, micro_batch=2, missing=1, layout=layout, again=False
    )
    group = replace(asked.groups[0], template=replace(asked.groups[0].template, chunks=chunks))
    made = bound(replace(asked, groups=(group,), schedule=schedule))
    require_valid(made, MODEL, CLUSTER)
    assert len({device for pipeline in made.pipelines for stage in pipeline.stages for device in stage.devices}) == 4
    program = lower(made, MODEL, CLUSTER).program
    orders = SCHEDULES[schedule].orders(2, chunks, 4)
    for pipeline in made.pipelines:
        assert pipeline.place_of_stage == (0, 1) * chunks
        for devices, order in zip(pipeline.places, orders, strict=True):
            ran = program.ranks[CLUSTER.rank(devices[0])]
            assert tuple(action for action in ran if action.kind in "FBIW") == order
