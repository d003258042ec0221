"""Law 1 for stages that lie in parts on their devices: any widths, alone and combined with pipelines and replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from heterodyne.graph.ir import ModelGraph, Ref
from heterodyne.graph.sharding import Sharding, sharded
from heterodyne.plan.kept import names_of
from heterodyne.plan.sharded_stage import shard_stage
from multiprocess.exactness import Spread, require_exact
from multiprocess.models import BRANCHED, EXPERTS, MIXING, captured
from multiprocess.pool import Pool
from multiprocess.test_exactness_pipelines import reranked
from multiprocess.work import PipelineOf, StageOf, cluster_of, staged_plan

MODELS = ("gpt", "weighted", "llama", "gpt2", "bert", *BRANCHED)


def spread(world: int, *pipelines: PipelineOf, schedule: str = "1F1B") -> Spread:
    return Spread(world=world, schedule=schedule, pipelines=pipelines)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["split", "context"])
def test_a_stage_in_parts_of_unequal_widths(pool: Pool, name: str, kind: str) -> None:
    graph = captured(name)
    stage = StageOf(len(graph.ops), (0, 1), (2, 1), kind=kind)
    require_exact(pool, name, spread(2, PipelineOf((2, 3), (stage,))))


@pytest.mark.parametrize("name", ["llama", "bert", "marked_mixtral"])
@pytest.mark.parametrize("kind", ["split", "context"])
def test_rows_of_a_mesh_share_the_samples_of_parts_of_unequal_widths(pool: Pool, name: str, kind: str) -> None:
    """Data parallelism along the outer axis, beside stages on one device, and in micro-batches of which a row has nothing."""
    ops = len(captured(name).ops)
    mesh = StageOf(ops, (0, 1, 2, 3), (2, 1), kind=kind, rows=(1, 2))
    require_exact(pool, name, spread(4, PipelineOf((2, 3, 1), (mesh,))))
    front = StageOf(ops // 2, (4, 2, 1, 0), (1, 3), kind=kind, rows=(3, 1))
    require_exact(pool, name, spread(5, PipelineOf((4, 1), (front, StageOf(ops, (3,), (1,))))))


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("kinds", [("context", "split"), ("split", "context")])
def test_sequences_and_weights_in_parts_at_once(pool: Pool, name: str, kinds: tuple[str, str]) -> None:
    """Alone with halves in turns, and in a pipeline; of a micro-batch a device may receive nothing."""
    ops = len(captured(name).ops)
    alone = StageOf(ops, (0, 1, 2, 3), (2, 1), kind=kinds[0], inner=((kinds[1], (1, 2)),), overlap=True, free=True)
    require_exact(pool, name, spread(4, PipelineOf((2, 3, 1), (alone,))))
    front = StageOf(ops // 2, (4, 2, 1, 0), (1, 3), kind=kinds[0], inner=((kinds[1], (1, 2)),), free=True)
    require_exact(pool, name, spread(5, PipelineOf((4, 1), (front, StageOf(ops, (3,), (1,))))))


def test_replicas_sequences_and_weights(pool: Pool) -> None:
    """Three axes, with halves in turns."""
    inner = (("split", (1, 2)),)
    stage = StageOf(
        len(captured("llama").ops),
        tuple(range(8)),
        (2, 1),
        rows=(1, 2),
        kind="context",
        inner=inner,
        overlap=True,
        free=True,
    )
    require_exact(pool, "llama", spread(8, PipelineOf((2, 4, 1), (stage,))))


@pytest.mark.parametrize("hosts", ["", "abab", "aaab"])
@pytest.mark.parametrize("kind", ["replicate", "context"])
def test_experts_along_two_axes(pool: Pool, kind: str, hosts: str) -> None:
    """Of samples or sequences along the one axis, and of weights along the other."""
    graph = captured("marked_mixtral")
    marked = tuple((task_graph.name, "split", (1, 2)) for task_graph in graph.task_graphs)
    stage = StageOf(
        len(graph.ops),
        (0, 1, 2, 3),
        (2, 1),
        kind=kind,
        marked=marked,
        inner=(("split", (1, 2)),),
        free=True,
        hierarchical=bool(hosts),
    )
    require_exact(pool, "marked_mixtral", replace(spread(4, PipelineOf((2, 3, 1), (stage,))), hosts=hosts))


@pytest.mark.parametrize("name", ["transformer", "attention"])
@pytest.mark.parametrize("shares", [(2, 1), (1, 3, 2)])
def test_layers_of_torch_itself(pool: Pool, name: str, shares: tuple[int, ...]) -> None:
    graph = captured(name)
    pipeline = PipelineOf((2, 3), (StageOf(len(graph.ops), tuple(range(len(shares))), shares, kind="split"),))
    layouts = sharding_of(graph, pipeline).layouts
    matrices = [p.name for p in graph.parameters if p.name.endswith(("in_proj_weight", "linear1.weight"))]
    assert matrices
    assert all(layouts[Ref(name)].kind == "shard" for name in matrices)
    require_exact(pool, name, spread(len(shares), pipeline))


@pytest.mark.parametrize("name", ["gpt", "llama", "mixtral"])
def test_devices_of_a_stage_need_not_be_in_the_order_of_their_ranks(pool: Pool, name: str) -> None:
    ops = len(captured(name).ops)
    alone = StageOf(ops, (2, 0, 1), (1, 3, 2), kind="split")
    require_exact(pool, name, spread(3, PipelineOf((4, 3), (alone,))))
    behind = (StageOf(ops // 2, (1,), (1,)), StageOf(ops, (2, 0), (1, 3), kind="split"))
    require_exact(pool, name, spread(3, PipelineOf((4, 3), behind)))


@pytest.mark.parametrize("name", [*MODELS, "mixtral"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_halves_of_micro_batches_in_turns(pool: Pool, name: str, schedule: str) -> None:
    """What one half exchanges is on its way while the other one computes; a micro-batch of one sample has no halves."""
    stage = StageOf(len(captured(name).ops), (0, 1), (2, 1), kind="split", overlap=True)
    require_exact(pool, name, spread(2, PipelineOf((3, 1, 2), (stage,)), schedule=schedule))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("name", ["gpt", "llama", "mixtral", "gpt2", "weighted"])
def test_halves_of_micro_batches_in_turns_inside_a_pipeline(pool: Pool, name: str, schedule: str) -> None:
    """Devices share the samples of a half otherwise than those of the whole: 3 by (2, 1), and 2 and 1 of them."""
    ops = len(captured(name).ops)
    stages = (
        StageOf(ops // 3, (0, 1), (2, 1), kind="split", overlap=True, free=True),
        StageOf(2 * ops // 3, (2, 3), (1, 3), kind="split", overlap=True),
        StageOf(ops, (4, 5), (1, 1), kind="context", overlap=True),
    )
    require_exact(pool, name, spread(6, PipelineOf((3, 1, 2), stages), schedule=schedule))


@st.composite
def spreads(draw: st.DrawFn, name: str) -> Spread:
    """Pipelines of up to two stages, each on one to three devices, in parts or by samples, or along two axes; one may be beside."""
    graph = captured(name)
    ops, rank, made = len(graph.ops), 0, []
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(1, 2))
        cuts = sorted(draw(st.lists(st.integers(1, ops - 1), min_size=count - 1, max_size=count - 1, unique=True)))
        stages = []
        for stop in [*cuts, ops]:
            width = draw(st.integers(1, min(3, 6 - rank))) if rank < 6 else 0
            if not width:
                break
            second = draw(st.sampled_from(("rows", "split", "context", ""))) if 4 <= 2 * width <= 6 - rank else ""
            pair = (draw(st.integers(1, 2)), 1) if second else ()
            start = stages[-1].stop if stages else 0
            kind = draw(st.sampled_from(("split", "split", "context", "replicate")))
            overlap = width > 1 and kind != "replicate" and draw(st.booleans())
            whole = [n for n, block in enumerate(graph.blocks) if start <= block.start < block.stop <= stop]
            again = () if overlap else tuple(n for n in whole if draw(st.integers(0, 3)) == 0)
            hosted = () if overlap else tuple(n for n in whole if n not in again and draw(st.integers(0, 3)) == 0)
            names = sorted({label for n in again for label in names_of(graph, graph.blocks[n])})
            stages.append(
                StageOf(
                    stop,
                    tuple(range(rank, rank + width * max(1, len(pair)))),
                    tuple(draw(st.integers(1, 3)) for _ in range(width)),
                    again,
                    keep=draw(st.lists(st.sampled_from(names), unique=True).map(tuple)) if names else (),
                    kind=kind,
                    overlap=overlap,
                    hosted=hosted,
                    rows=pair if second == "rows" else (),
                    inner=((second, pair),) if second in ("split", "context") else (),
                    free=draw(st.booleans()),
                )
            )
            rank += width * max(1, len(pair))
        if stages and stages[-1].stop == ops:
            made.append(PipelineOf(tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))), tuple(stages)))
    if not made:
        made = [PipelineOf((2,), (StageOf(ops, (0, 1), (1, 2), kind="split"),))]
        rank = 2
    world = 1 + max(r for pipeline in made for stage in pipeline.stages for r in stage.ranks)
    schedule = draw(st.sampled_from(("1F1B", "GPipe", "ZBH1")))
    bucket_bytes = draw(st.sampled_from((256, 4096)))
    return reranked(draw, Spread(world=world, schedule=schedule, pipelines=tuple(made), bucket_bytes=bucket_bytes))


@pytest.mark.parametrize("name", [*MODELS, "mixtral"])
@settings(
    max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate)
)
@given(data=st.data())
def test_random_plans(pool: Pool, name: str, data: st.DataObject) -> None:
    require_exact(pool, name, data.draw(spreads(name)))


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("kind", ["split", "context"])
def test_statistics_of_the_batch_in_a_stage_in_parts(pool: Pool, name: str, kind: str) -> None:
    """BatchNorm is done on samples, wherever its channels were before: the statistics are those of all of them.

    Of a micro-batch with fewer samples than devices one has none, and adds nothing.
    """
    stage = StageOf(len(captured(name).ops), (0, 1, 2), (2, 1, 1), kind=kind)
    require_exact(pool, name, spread(3, PipelineOf((4, 5, 2), (stage,))))


@pytest.mark.parametrize("name", MIXING)
def test_statistics_of_the_batch_over_all_rows(pool: Pool, name: str) -> None:
    stage = StageOf(len(captured(name).ops), (0, 1, 2, 3), (2, 1), kind="split", rows=(2, 1))
    require_exact(pool, name, spread(4, PipelineOf((8, 7), (stage,))))


def test_a_replicated_backbone_and_a_split_head_share_devices(pool: Pool) -> None:
    """Whale's figure 13: samples are cut in the one TaskGraph, classes in the other."""
    graph = captured("marked")
    names = [task_graph.name for task_graph in graph.task_graphs]
    stage = StageOf(len(graph.ops), (0, 1, 2), (1, 3, 2), marked=((names[-1], "split", (2, 1, 1)),))
    require_exact(pool, "marked", spread(3, PipelineOf((4, 3), (stage,))))


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("shares", [(2, 1), (1, 3, 2), (1, 2, 1, 1)])
def test_experts_in_parts(pool: Pool, name: str, shares: tuple[int, ...]) -> None:
    graph = captured(name)
    pipeline = PipelineOf((2, 3), (StageOf(len(graph.ops), tuple(range(len(shares))), shares, kind="split"),))
    sharding = sharding_of(graph, pipeline)
    matrices = [p.name for p in graph.parameters if len(p.shape) == 3]
    assert len(matrices) == 4, "two in each layer"
    if name != "moe_indexed":  # which takes the matrices of a choice out of all of them
        assert {sharding.layouts[Ref(matrix)] for matrix in matrices} == {sharded(0)}
    require_exact(pool, name, spread(len(shares), pipeline))


@pytest.mark.parametrize(
    ("samples", "experts"),
    [((1, 1), (1, 4)), ((2, 1, 1), (1, 1, 3)), ((1, 3, 1), (1, 0, 2)), ((1, 2, 0, 1), (1, 1, 2, 1))],
)
def test_tokens_travel_to_their_experts(pool: Pool, samples: tuple[int, ...], experts: tuple[int, ...]) -> None:
    """Data and expert parallelism on the same devices: all have samples, and experts, in shares of their own; some have none."""
    graph = captured("marked_mixtral")
    marked = tuple((task_graph.name, "split", experts) for task_graph in graph.task_graphs)
    stage = StageOf(len(graph.ops), tuple(range(len(samples))), samples, marked=marked)
    pipeline = PipelineOf((2, 5, 1), (stage,))
    sharding = sharding_of(graph, pipeline)
    assert [sharding.strategies[op.name].name for op in graph.ops if op.kind == "experts"] == ["ne", "ne"]
    require_exact(pool, "marked_mixtral", spread(len(samples), pipeline))


@pytest.mark.parametrize("hosts", ["aab", "abb"])
@pytest.mark.parametrize("how", ["plain", "halves in turns", "recomputed"])
def test_tokens_travel_once_to_each_host(pool: Pool, hosts: str, how: str) -> None:
    graph = captured("marked_mixtral")
    marked = tuple((task_graph.name, "split", (2, 1, 2)) for task_graph in graph.task_graphs)
    again = tuple(range(len(graph.blocks))) if how == "recomputed" else ()
    stage = StageOf(
        len(graph.ops),
        (2, 0, 1),
        (2, 1, 1),
        recompute=again,
        marked=marked,
        overlap=how == "halves in turns",
        hierarchical=True,
    )
    schedule = "1F1B" if how == "recomputed" else "ZBH1"
    plan = spread(3, PipelineOf((2, 5, 1), (stage,)), schedule=schedule)
    require_exact(pool, "marked_mixtral", replace(plan, hosts=hosts))


def test_experts_in_each_row(pool: Pool) -> None:
    """Replicas, and in each of them experts and samples in shares of their own."""
    graph = captured("marked_mixtral")
    marked = tuple((task_graph.name, "split", (1, 2)) for task_graph in graph.task_graphs)
    stage = StageOf(len(graph.ops), (0, 3, 2, 1), (2, 1), marked=marked, rows=(1, 2))
    require_exact(pool, "marked_mixtral", spread(4, PipelineOf((3, 5, 1), (stage,))))


def sharding_of(graph: ModelGraph, pipeline: PipelineOf) -> Sharding:
    """Of its only stage."""
    world = len(pipeline.stages[0].ranks)
    found = shard_stage(graph, staged_plan(graph, cluster_of(world), [pipeline], "1F1B").pipelines[0], 0)
    assert found is not None
    return found
