"""Law 1 for pipelines: whatever the cuts, the schedule, the widths and the shares, loss and gradients are those of one device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.runtime.exact.verify import compare, one_device_gradients
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, copied, staged_worker

BAR = 1e-5
SEED, STEP = 5, 3
PLAIN = ("gpt", "sum", "weighted", "llama", "gpt2", "bert")


@dataclass(frozen=True)
class Spread:
    """A plan for some number of ranks."""

    world: int
    schedule: str
    pipelines: tuple[PipelineOf, ...]
    bucket_bytes: int = 4096


def errors_of(world: World, graph: ModelGraph, spread: Spread) -> list[tuple[str, float]]:
    """One step under the plan against one device: the largest errors over all that this rank holds."""
    samples = sum(sum(pipeline.sizes) for pipeline in spread.pipelines)
    case = build(graph, samples)
    alone = build(graph, samples)
    worker = staged_worker(world, case, spread.pipelines, spread.schedule, bucket_bytes=spread.bucket_bytes, seed=SEED)
    loss, gradients = worker.gradients(case.batch, STEP)
    gradients = copied(gradients)
    held = {name for name in worker.ownership.owners if worker.ownership.holds(world.rank, name)}
    active = worker.placement.places[world.rank].active
    worker.close()
    expected_loss, expected = one_device_gradients(
        alone.module,
        alone.batch,
        graph=graph,
        placement=worker.placement,
        device=torch.device("cpu"),
        precision="fp32",
        loss_count=alone.count,
        seed=SEED,
        step=STEP,
    )
    of_mine = {name: gradient for name, gradient in expected.items() if name in held}
    found = compare(loss, gradients if active else of_mine, expected_loss, of_mine)
    return [("loss", found.loss), *found.gradients[:2]]


@st.composite
def spreads(draw: st.DrawFn, ops: int, blocks: int) -> Spread:
    """One or two pipelines that are not alike, of one or more stages, of one or more devices each; a rank may be idle."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    chosen = SCHEDULES[schedule]
    world, pipelines = 0, []
    for _ in range(draw(st.integers(1, 2))):
        places = []
        for _ in range(draw(st.integers(1 if chosen.chunks in (1, None) else 2, 2 if pipelines else 3))):
            width = draw(st.sampled_from((1, 1, 2)))
            places.append(tuple(range(world, world + width)))
            world += width
        chunks = chosen.chunks or draw(st.integers(1, 2))
        homes = chosen.stage_places(len(places), chunks)
        cuts = draw(st.lists(st.integers(1, ops - 1), min_size=len(homes) - 1, max_size=len(homes) - 1, unique=True))
        of_place = [tuple(draw(st.integers(1, 3)) for _ in place) for place in places]
        stages = tuple(
            StageOf(stop, places[home], of_place[home]) for stop, home in zip([*sorted(cuts), ops], homes, strict=True)
        )
        sizes = draw(st.lists(st.integers(1, 3), min_size=0 if pipelines else 1, max_size=4).map(tuple))
        pipelines.append(PipelineOf(sizes, stages))
    del blocks
    return Spread(
        world + (world < 5 and draw(st.booleans())), schedule, tuple(pipelines), draw(st.sampled_from((1, 4096, 10**7)))
    )


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_pipelines_give_the_gradients_of_one_device(name: str, pool: Pool, data: st.DataObject) -> None:
    graph = captured(name)
    spread = data.draw(spreads(len(graph.ops), len(graph.blocks)).filter(lambda s: s.world <= 6))
    for errors in pool.run(spread.world, errors_of, graph, spread):
        for what, error in errors:
            assert error <= BAR, (what, error)
