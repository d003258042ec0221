"""A device that runs out of memory in the middle of a step, told in the words of the plan: who, where, how much, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from heterodyne.errors import WorkerError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from heterodyne.runtime.placement import Place
from heterodyne.units import format_bytes

__all__ = ["told_with_stage"]

_ON_HOST = "allocate memory"  # what PyTorch's allocator of the host says


@contextmanager
def told_with_stage(
    device: torch.device, plan: Plan, graph: ModelGraph, place: Place, step: int, doing: Callable[[], str]
) -> Iterator[None]:
    """Around a step, counted from 0; ``doing``: the action that this rank is in. Raises WorkerError for a lack of memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _ON_HOST not in str(error):
            raise
        said = " ".join(str(error).split())
        where = f"step {step + 1}, in {doing() or 'its begin'}{_held(plan, graph, place)}"
        raise WorkerError(
            f"rank {place.rank} ({place.device}) ran out of memory in {where}{_in_use(device)}: {said}. {_remedy(plan, place)}",
            rank=place.rank,
        ) from error


def _held(plan: Plan, graph: ModelGraph, place: Place) -> str:
    """Which stages this rank has, and from which block to which."""
    if place.pipeline is None:
        return ""
    words = []
    for number in place.stages:
        start, stop = plan.pipelines[place.pipeline].stages[number].ops
        blocks = [block.name for block in graph.blocks if block.start < stop and block.stop > start]
        words.append(f"stage {number}" + (f", {blocks[0]} to {blocks[-1]}" if blocks else ""))
    return f" ({'; '.join(words)})"


def _in_use(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    used, most = torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
    return f", with {format_bytes(used)} in use and {format_bytes(most)} at most so far"


def _remedy(plan: Plan, place: Place) -> str:
    sizes = plan.pipelines[place.pipeline].micro_batches.sizes if place.pipeline is not None else ()
    largest = max(sizes, default=1)
    smaller = (
        f"micro-batches of {largest // 2} in place of {largest} samples keep about half as much (parallelism.micro_batch_sizes); "
        if largest > 1
        else ""
    )
    return (
        f"Next: {smaller}or state less memory for this device in the cluster file (`memory:`) and plan again, so that it gets less of the "
        "model. The run goes on from its last checkpoint with --resume --plan NEW"
    )
