"""Each rank has memory for what it holds of the weights, and never for the whole model, rank 0 included."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.boxes import Box, Slice
from heterodyne.processes.heap import trim_heap
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.weights.materialise import place_weights, stored_tensors
from heterodyne.runtime.weights.recorded_build import RecordedBuild
from heterodyne.stored_weights import StoredWeights
from multiprocess.models import Case, TinyGPT, build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, staged_worker

WIDTH, LAYERS, RANKS = 1024, 36, 3
TOTAL = LAYERS * WIDTH * WIDTH * 4
CPU = torch.device("cpu")


def made(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def holders_of(name: str, kind: str) -> dict[int, Box]:
    """A third of the model on each rank, as layers or as rows; and where it is split, the first layer whole on two of them."""
    layer = int(name.split(".")[0])
    if kind == "pipeline":
        return {layer * RANKS // LAYERS: ()}
    if layer == 0:
        return {0: (), 2: ()}
    borders = (0, 100, 500, WIDTH)
    return {rank: (Slice(0, borders[rank], borders[rank + 1]),) for rank in range(RANKS)}


def anonymous_bytes() -> int:
    """Return the resident memory of this process that no file stands behind and the allocator does not keep of what was freed.

    The system drops and reads pages of libraries as it likes, and what the allocator keeps follows what the process did before.
    """
    trim_heap()
    return int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def placed(world: World, communicator: Communicator, width: int, kind: str) -> tuple[nn.Module, int]:
    """Return the module and the most memory that this process had when a weight was made or arrived."""
    with torch.device("meta"):
        module = made(width)
    recorded = RecordedBuild.of(lambda: made(width))
    assert recorded is not None
    seen = []

    def kept(_: str, own: Tensor) -> Tensor:
        seen.append(anonymous_bytes())
        return own

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, value in recorded.weights():
            yield name, kept(name, value)
            del value

    place_weights(
        module,
        communicator,
        lambda name: holders_of(name, kind),
        values=values() if world.rank == 0 else None,
        keep=kept,
    )
    return module, max(seen)


def place(world: World, kind: str) -> tuple[int, int, dict[str, Tensor]]:
    """By how much the memory grew at most, what is held, and the last two weights of it."""
    communicator = Communicator(rank=world.rank, world_size=world.world_size, device=CPU)
    placed(world, communicator, 2, "pipeline")  # what is made once for any model
    before = anonymous_bytes()
    module, most = placed(world, communicator, WIDTH, kind)
    grown = most - before
    held = {name: tensor.detach() for name, tensor in stored_tensors(module) if not tensor.is_meta}
    communicator.close()
    last = {name: held[name][:2, :5].clone() for name in list(held)[-2:]}
    return grown, sum(tensor.nbytes for tensor in held.values()), last


@pytest.mark.parametrize("kind", ["pipeline", "split"])
def test_no_rank_has_memory_for_the_whole_model(pool: Pool, kind: str) -> None:
    with torch.random.fork_rng([]):
        expected = dict(stored_tensors(made()))
    for rank, (grown, held, last) in enumerate(pool.run(RANKS, place, kind)):
        own = [(name, holders_of(name, kind)[rank]) for name in expected if rank in holders_of(name, kind)]
        rows = sum(box[0].stop - box[0].first if box else WIDTH for _, box in own)
        assert held == rows * WIDTH * 4
        assert grown < (held + TOTAL) / 2, f"rank {rank} grew by {grown / 2**20:.0f} MiB and holds {held / 2**20:.0f}"
        for name, values in last.items():
            box = holders_of(name, kind)[rank]
            first = box[0].first if box else 0
            assert torch.equal(values, expected[name][first : first + 2, :5].detach())


def gpt() -> nn.Module:
    torch.manual_seed(7)
    return TinyGPT().train()


def steps(world: World, found: ModelGraph, folder: Path, source: str | None) -> list[float]:
    """Losses under two stages: of a model with weights on rank 0, or of one without any that takes them from a source."""
    with torch.device("cpu" if source is None else "meta"):
        module = gpt()
    batch = build(found, 4).batch
    recorded = RecordedBuild.of(gpt) if source == "seed" and world.rank == 0 else None
    ops = len(found.ops)
    stages = (StageOf(ops // 2, (0,), (1,)), StageOf(ops, (1,), (1,)))
    worker = staged_worker(
        world,
        Case(module=module, graph=found, batch=batch),
        [PipelineOf((2, 2), stages)],
        "GPipe",
        stored=StoredWeights.of(folder, module) if source == "files" else None,
        weights=None if recorded is None else recorded.weights(),
    )
    losses = [worker.step(batch).loss for _ in range(3)]
    worker.close()
    return losses


@pytest.mark.parametrize("source", ["seed", "files"])
def test_training_goes_as_from_a_model_that_one_rank_has(pool: Pool, source: str, tmp_path: Path) -> None:
    with torch.random.fork_rng([]):
        save_file({name: p.detach().clone() for name, p in gpt().named_parameters()}, tmp_path / "model.safetensors")
    found = captured("gpt")
    expected = pool.run(2, steps, found, tmp_path, None)
    assert pool.run(2, steps, found, tmp_path, source) == expected
    assert expected[0][-1] < expected[0][0]
