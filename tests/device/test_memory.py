"""A device whose memory ends in the middle of a step."""

from __future__ import annotations

import pytest

from device.test_exactness import A
from heterodyne.errors import WorkerError
from heterodyne.graph.ir import ModelGraph
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World, accelerator
from multiprocess.test_training_pipelines import Spread, worker_under
from multiprocess.work import PipelineOf, StageOf


def short_of_memory(world: World, graph: ModelGraph, spread: Spread) -> str:
    """What is said when no byte is left."""
    case = build(graph, 4)
    worker = worker_under(world, case, spread)
    worker.step(case.batch)
    device = accelerator(world.device)
    device.limit(0)
    try:
        with pytest.raises(WorkerError) as caught:
            worker.step(case.batch)
    finally:
        device.limit(2**30)
    worker.close()
    assert caught.value.rank == 0
    return str(caught.value)


def test_it_is_told_who_lacked_how_much_where_and_what_to_try(pool: Pool) -> None:
    graph = captured("gpt2")
    spread = ("1F1B", (PipelineOf((2, 2), (StageOf(len(graph.ops), (0,), (1,)),)),))
    (told,) = pool.run(1, short_of_memory, graph, spread, devices=(A,))
    assert "rank 0 (" in told
    assert "ran out of memory in step 2, in 0F0 (stage 0, " in told
    assert " in use and " in told
    assert "Tried to allocate" in told
    assert "micro-batches of 1 in place of 2 samples" in told
