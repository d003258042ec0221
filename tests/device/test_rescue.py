"""What each rank holds, written by each alone, makes the state of all, whatever the plan cuts; and is none if one had gone further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device.test_exactness import CPU, A, B
from device.test_state_sharding import MIXED, worker_in
from heterodyne.errors import OutOfMemoryError
from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.checkpoint.random_state import random_state
from heterodyne.runtime.checkpoint.rescue import Moment, Rescue, rescued
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.records.shortages import Shortage
from heterodyne.runtime.worker import Worker
from multiprocess.models import build, captured
from multiprocess.pool import Pool, World
from multiprocess.test_state_sharding import layered, sharded, wide
from multiprocess.test_training_pipelines import SAMPLES, Spread, chain, in_parts


def keep(worker: Worker, folder: Path, step: int) -> None:
    def moment() -> Moment | None:
        held = worker.state.held()
        return None if held is None else Moment(step=step, state=held, random=random_state())

    about: dict[str, Any] = {"run": "one", "identity": {}, "plan": worker.plan.dump()}
    rescue = Rescue(folder, rank=worker.rank, size=dist.get_world_size(), moment=moment, still=lambda _: True, **about)
    with worker.state.aside():
        rescue.write()
    dist.barrier()


def no_memory_in_the_update(worker: Worker, batch: Any) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 KiB")

    worker.optimizer.register_step_pre_hook(fails)
    worker._variants.writes.leave()  # the hook is no change of a script's
    with pytest.raises(OutOfMemoryError, match="in 0STEP") as caught:
        worker.step(batch)
    assert worker.state.held() is None
    shortage = caught.value.shortage
    assert isinstance(shortage, Shortage)
    assert (shortage.step, shortage.asked_bytes, shortage.longer) == (4, 2048, False)


def resumed(
    world: World, graph: ModelGraph, before: Spread, after: Spread, zero: int, precision: Any, folder: Path
) -> tuple[list[float], list[float], str]:
    """Losses undisturbed, and those of another worker that takes over what was rescued after two steps; why a later rescue failed."""
    batch = build(graph, SAMPLES).batch
    worker = worker_in(world, graph, before, precision, zero)
    for _ in range(2):
        worker.step(batch)
    keep(worker, folder, 2)
    checkpoints, ranks = Checkpoints(folder, agreement=Agreement.of_all()), Agreement.of_all()
    assert rescued(folder, ranks) == (2, "")
    losses = [worker.step(batch).loss for _ in range(2)]
    keep(worker, folder, 4 if world.rank else 3)
    _, why = rescued(folder, ranks)
    if not zero:
        no_memory_in_the_update(worker, batch)
    worker.close()
    other = worker_in(world, graph, after, precision, 0)
    found = checkpoints.latest()
    assert found is not None
    restored = checkpoints.load(found, identity={}, wanted=other.state.needs)
    assert restored.random is not None
    other.state.load_state_dict(restored.state)
    again = [other.step(batch).loss for _ in range(2)]
    other.close()
    return losses, again, why


@pytest.mark.parametrize(
    ("before", "zero", "shares", "precision", "after"),
    [
        (in_parts, 0, (), "fp32", chain),
        (wide, 2, (0, 1, 5, 3), "fp32", in_parts),
        (layered, 3, (3, 1, 2), "mixed", layered),
    ],
)
def test_another_plan_goes_on_from_what_each_rank_held(
    pool: Pool, before: Any, zero: int, shares: tuple[int, ...], precision: str, after: Any, tmp_path: Path
) -> None:
    graph = captured("gpt2")
    spread = sharded(before(graph), *shares) if shares else before(graph)
    found = pool.run(
        4,
        resumed,
        graph,
        spread,
        after(graph),
        zero,
        MIXED if precision == "mixed" else precision,
        tmp_path,
        devices=(A, B, A, CPU),
    )
    for undisturbed, again, why in found:
        assert again == pytest.approx(undisturbed, rel=1e-5)
        assert why == "some ranks were behind step 3, others behind step 4"
