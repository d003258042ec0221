"""Law 1 for pipelines: whatever the cuts, schedules, widths, shares and recompute, loss and gradients are those of one device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.kept import names_of
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.best import best_orders
from heterodyne.plan.schedules.times import StageTimes
from heterodyne.plan.weights import PlannedWeights
from multiprocess.exactness import BAR, Errors, Spread, errors_of, require_exact
from multiprocess.models import BRANCHED, MIXING, captured
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, cluster_of, staged_plan

BAR_BF16 = 0.1
EXACT = sorted(name for name, made in SCHEDULES.items() if not made.asynchronous)
PLAIN = ("gpt", "sum", "weighted", "llama", "gpt2", "bert", *BRANCHED)


def slices_of_ops(draw: st.DrawFn, graph: ModelGraph, homes: Sequence[tuple[int, ...]]) -> tuple[StageOf, ...]:
    """The model cut anywhere, one stage for each of these groups of ranks; blocks that are whole in one may be recomputed there,
    all of them or all but what some ops make, or wait on the host, and come back early or late.
    """
    ops = len(graph.ops)
    cuts = draw(st.lists(st.integers(1, ops - 1), min_size=len(homes) - 1, max_size=len(homes) - 1, unique=True))
    shares = {ranks: tuple(draw(st.integers(1, 3)) for _ in ranks) for ranks in dict.fromkeys(homes)}
    stages, start = [], 0
    for stop, ranks in zip([*sorted(cuts), ops], homes, strict=True):
        whole = [n for n, block in enumerate(graph.blocks) if start <= block.start < block.stop <= stop]
        ways = [draw(st.sampled_from(("kept", "again", "hosted"))) for _ in whole]
        again, hosted = (
            tuple(n for n, way in zip(whole, ways, strict=True) if way == which) for which in ("again", "hosted")
        )
        names = sorted({name for n in again for name in names_of(graph, graph.blocks[n])})
        keep = draw(st.lists(st.sampled_from(names), unique=True).map(tuple)) if names else ()
        ahead = draw(st.sampled_from((None, 0, 1, 3))) if hosted else None
        stages.append(StageOf(stop, ranks, shares[ranks], again, keep=keep, hosted=hosted, reload=ahead))
        start = stop
    return tuple(stages)


def found_order(
    draw: st.DrawFn, places: Sequence[int], stages: Sequence[StageOf], micro_batches: int
) -> tuple[str, ...]:
    """The best orders for stages of unlike speed."""
    seconds = st.integers(1, 4).map(float)
    times = [
        StageTimes(
            forward_s=draw(seconds),
            input_s=draw(seconds),
            weight_s=draw(seconds),
            recompute_s=draw(seconds) if stage.recompute else 0.0,
        )
        for stage in stages
    ]
    orders = best_orders(times, places, micro_batches, actions_played=3000).orders
    return tuple(" ".join(map(str, row)) for row in orders)


def numbered(homes: Sequence[int]) -> list[int]:
    """Places counted in the order in which they are first named."""
    order = {home: number for number, home in enumerate(dict.fromkeys(homes))}
    return [order[home] for home in homes]


def reranked(draw: st.DrawFn, spread: Spread) -> Spread:
    """The same plan on the same devices in another order: which rank has what is nothing that exactness may depend on."""
    order = draw(st.permutations(range(spread.world)))
    return replace(
        spread,
        pipelines=tuple(
            replace(
                pipeline,
                stages=tuple(replace(stage, ranks=tuple(order[r] for r in stage.ranks)) for stage in pipeline.stages),
            )
            for pipeline in spread.pipelines
        ),
    )


@st.composite
def pipelines(
    draw: st.DrawFn, graph: ModelGraph, schedule: str, first_rank: int, most: int, *, named: bool = False
) -> PipelineOf:
    """On at most ``most`` places, in the order of the schedule or (unless ``named``) in one that was found for places drawn at will."""
    chosen = SCHEDULES[schedule]
    longest = min(most, len(graph.ops) // max(1, chosen.chunks or 1))
    least = 1 if longest < 2 or chosen.chunks in (1, None) else 2
    count = draw(st.integers(least, max(least, longest)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple))
    others = first_rank > 0  # who take the samples
    free = not named and draw(st.integers(0, 2)) == 0
    if free:
        stages = draw(st.integers(1, min(len(graph.ops), 4)))
        homes = numbered(draw(st.lists(st.integers(0, count - 1), min_size=stages, max_size=stages)))
    else:
        chunks = chosen.chunks or draw(st.integers(1, 2 if 2 * count <= len(graph.ops) else 1))
        homes = list(chosen.stage_places(count, chunks)) if count > 1 or chosen.chunks in (1, None) else [0]
    ranks = []
    for _ in range(1 + max(homes)):
        width = draw(st.sampled_from((1, 1, 2)))
        ranks.append(tuple(range(first_rank, first_rank + width)))
        first_rank += width
    made = slices_of_ops(draw, graph, [ranks[home] for home in homes])
    if free:
        return PipelineOf(sizes, made, found_order(draw, homes, made, len(sizes)))
    return PipelineOf(() if others and draw(st.integers(0, 9)) == 0 else sizes, made)


@st.composite
def spreads(draw: st.DrawFn, graph: ModelGraph) -> Spread:
    """One to three pipelines that are not alike, of one or more stages, of one or more devices each; a rank may be idle. Those that hold
    the same weights may share out state, gradients and parameters.
    """
    schedule = draw(st.sampled_from(EXACT))
    made: list[PipelineOf] = []
    world = 0
    for number in range(draw(st.sampled_from((1, 2, 2, 3)))):
        made.append(draw(pipelines(graph, schedule, world, 3 - number)))
        world = 1 + max(rank for stage in made[-1].stages for rank in stage.ranks)
    zero = draw(st.sampled_from((0, 1, 2, 3, 3))) if share_weights(graph, world, made) else 0
    if zero:
        shares = [draw(st.integers(0, 3)) for _ in range(world)]
        made = [with_state(pipeline, shares) for pipeline in made]
    return reranked(
        draw,
        Spread(
            world + (world < 5 and draw(st.booleans())),
            schedule,
            tuple(made),
            draw(st.sampled_from((1, 4096, 10**7))),
            zero=zero,
        ),
    )


def with_state(pipeline: PipelineOf, shares: Sequence[int]) -> PipelineOf:
    """Each rank keeps so much of the state."""
    kept = (replace(stage, state=tuple(shares[rank] for rank in stage.ranks)) for stage in pipeline.stages)
    return replace(pipeline, stages=tuple(kept))


@st.composite
def replicas(draw: st.DrawFn, graph: ModelGraph) -> Spread:
    """As models that mix samples need it: pipelines that are cut alike, and go through as many micro-batches each."""
    schedule = draw(st.sampled_from(EXACT))
    first = draw(
        pipelines(graph, schedule, 0, 2, named=True).filter(lambda p: all(len(s.ranks) == 1 for s in p.stages))
    )
    count = draw(st.integers(1, 3))
    sizes = st.lists(st.integers(2, 3), min_size=count, max_size=count).map(tuple)
    width = 1 + max(rank for stage in first.stages for rank in stage.ranks)
    made = []
    for number in range(draw(st.integers(1, 2))):
        stages = tuple(
            replace(s, ranks=(s.ranks[0] + number * width,), reload=s.reload if number else None) for s in first.stages
        )
        made.append(PipelineOf(draw(sizes), stages))
    return reranked(draw, Spread(width * len(made), schedule, tuple(made)))


def share_weights(graph: ModelGraph, world: int, pipelines: Sequence[PipelineOf]) -> bool:
    """Whether any two ranks hold the same weight: stages that read none may have several ranks, and nothing to share out."""
    plan = staged_plan(graph, cluster_of(world, None), pipelines, "1F1B")
    return any(len(bucket.owners) > 1 for bucket in PlannedWeights.of(plan, graph).buckets)


def within(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@pytest.mark.parametrize("name", PLAIN)
@within(6)
@given(data=st.data())
def test_any_pipelines_give_the_gradients_of_one_device(name: str, pool: Pool, data: st.DataObject) -> None:
    graph = captured(name)
    spread = data.draw(spreads(graph).filter(lambda s: s.world <= 6 and any(p.sizes for p in s.pipelines)))
    for errors in pool.run(spread.world, errors_of, graph, spread):
        for what, error in errors:
            assert error <= BAR, (what, error)


@pytest.mark.parametrize("name", MIXING)
@within(5)
@given(data=st.data())
def test_batch_norm_sees_the_micro_batches_of_all_pipelines(name: str, pool: Pool, data: st.DataObject) -> None:
    require_exact(pool, name, data.draw(replicas(captured(name))))


def test_a_pipeline_without_samples_gathers_and_reduces_in_the_order_of_the_others(pool: Pool) -> None:
    """Its ranks share buckets with ranks that come to these at unlike times."""
    graph = captured("unet")
    ops = len(graph.ops)

    def stage(stop: int, rank: int) -> StageOf:
        return StageOf(stop, (rank,), (1,), ())

    without = PipelineOf((), (stage(2, 0), stage(ops, 1)))
    first_and_last = (stage(1, 2), stage(7, 3), stage(ops, 2))
    order = ("0F0 2F0 2B0 0B0", "1F0 1B0")
    spread = Spread(4, "1F1B", (without, PipelineOf((1,), first_and_last, order)), bucket_bytes=1, zero=3)
    require_exact(pool, "unet", spread)


def test_in_half_precision_the_gradients_are_near(pool: Pool) -> None:
    graph = captured("gpt2")
    ops = len(graph.ops)
    stages = (StageOf(ops // 3, (0,), (1,), (0,)), StageOf(ops, (1, 2), (1, 2)))
    spread = Spread(3, "ZBH1", (PipelineOf((3, 3, 1), stages),), precision="bf16")
    require_exact(pool, "gpt2", spread, bar=BAR_BF16)


def errors_of_compiled(world: World, graph: ModelGraph, spread: Spread) -> Errors:
    """Without inductor, which takes a minute: what is lost is lost before it. `benchmarks/accelerator_path.py` runs with it."""
    traced_only = functools.partial(torch.compile, backend="aot_eager")
    with warnings.catch_warnings(), mock.patch.object(torch, "compile", traced_only):
        warnings.simplefilter("ignore")  # those of the compiler, about itself
        return errors_of(world, graph, spread)


def test_compiled_stages_give_the_gradients_of_one_device(pool: Pool) -> None:
    """With a block that is recomputed, and micro-batches of two sizes."""
    graph = captured("sum")
    border = graph.blocks[len(graph.blocks) // 2].start
    stages = (StageOf(border, (0,), (1,), ()), StageOf(len(graph.ops), (1,), (1,), (len(graph.blocks) - 2,)))
    spread = Spread(2, "1F1B", (PipelineOf((2, 2, 1), stages),), compiled=True)
    require_exact(pool, "sum", spread, job=errors_of_compiled)


def test_a_pipeline_without_samples_shares_the_parameters_of_a_deeper_one(pool: Pool) -> None:
    """Its ranks have room for two buckets of gradients: in another order than the deeper pipeline comes to its gathers, they would hold one
    up that the others wait for behind messages."""

    def stage(stop: int, rank: int, state: int) -> StageOf:
        return StageOf(stop=stop, ranks=(rank,), shares=(1,), state=(state,))

    order = (
        "0F0 1F0 0F1 1F1 1I0 0F2 0I0 1F2 1I1 0F3 1I2 1F3 0I1 0F4 1I3 1F4 0I2 0I3 1I4 0I4 0W0 1W0 0W1 1W1 0W2 1W2 0W3 1W3 0W4 1W4",
        *(" ".join(f"{number}{kind}{index}" for index in range(5) for kind in "FIW") for number in (2, 3)),
    )
    stages = (stage(16, 1, 3), stage(24, 1, 3), stage(83, 0, 3), stage(94, 3, 3))
    deep = PipelineOf((3, 3, 1, 1, 1), stages, order)
    none = PipelineOf((), (stage(74, 2, 3), stage(94, 4, 0)))
    require_exact(pool, "bert", Spread(world=5, schedule="1F1B", pipelines=(deep, none), bucket_bytes=1, zero=3))
