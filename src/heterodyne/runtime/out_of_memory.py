"""A device that runs out of memory in mid run, told in the words of the plan: who, where, how much, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil
import torch
from torch import Tensor

from heterodyne.errors import OutOfMemoryError, UnitError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.lower import Lowered
from heterodyne.plan.placement import RankRole
from heterodyne.plan.plan import Plan
from heterodyne.runtime.records.shortages import Shortage
from heterodyne.units import format_bytes, parse_bytes

__all__ = ["longer_than_planned", "told_with_stage"]

_ON_HOST = "allocate memory"  # what PyTorch's allocator of the host says
_ASKED = re.compile(r"tried to allocate ([0-9.]+) ?([KMGT]iB|bytes)", re.ASCII | re.IGNORECASE)


@contextmanager
def told_with_stage(
    device: torch.device,
    lowered: Lowered,
    rank: int,
    step: int | None,
    doing: Callable[[], str],
    longer: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Around a step, counted from 0, or (None) what is none; ``doing``: the action that this rank is in; ``longer``: whether its samples
    are longer than those that the plan was made for. Raises OutOfMemoryError, which has a `Shortage`, for a lack of memory.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _ON_HOST not in str(error):
            raise
        said = " ".join(str(error).split())
        where = doing() or "its begin"
        plan, role = lowered.plan, lowered.placement.places[rank]
        where = (where if step is None else f"step {step + 1}, in {where}") + _held(lowered.graph, role)
        shortage = _shortage(device, plan, role, step, where, said, longer=longer())
        told = OutOfMemoryError(
            f"rank {rank} ({role.device}) ran out of memory in {where}{_in_use(device)}: {said}. {_remedy(role)}",
            rank=rank,
        )
        told.shortage = shortage
        raise told from error


def longer_than_planned(inputs: Mapping[str, Tensor], graph: ModelGraph) -> bool:
    """Whether samples are larger in any dim than those that the model was captured with."""
    for entry in graph.inputs:
        tensor, shape = inputs.get(entry.name), entry.spec.shape
        if tensor is not None and tensor.dim() == len(shape):
            sizes = zip(tensor.shape, shape, strict=True)
            if any(dim != entry.batch_dim and size > planned(1) for dim, (size, planned) in enumerate(sizes)):
                return True
    return False


def _shortage(
    device: torch.device, plan: Plan, role: RankRole, step: int | None, where: str, said: str, *, longer: bool
) -> Shortage:
    used, free = _used_and_free(device)
    asked = _ASKED.search(said)
    asked_bytes = 1
    if asked is not None:
        with suppress(UnitError):
            asked_bytes = max(1, parse_bytes(f"{asked[1]} {asked[2].replace('bytes', 'B')}"))
    return Shortage(
        device=role.device,
        rank=role.rank,
        step=step,
        where=where,
        used_bytes=used,
        asked_bytes=asked_bytes,
        # What it was refused, it had not; the rest is too finely cut.
        free_bytes=min(free, asked_bytes - 1),
        predicted_bytes=0 if plan.predicted is None else plan.predicted.memory_bytes.get(role.device, 0),
        longer=longer,
    )


def _used_and_free(device: torch.device) -> tuple[int, int]:
    """Of the device's memory what this process holds, and what nobody does (0 where the driver does not say); of the host what this
    process occupies.
    """
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss), 0
    free = 0
    with suppress(RuntimeError, AttributeError, NotImplementedError):
        free = int(torch.accelerator.get_memory_info(device)[0])
    return int(torch.accelerator.memory_allocated(device)), free


def _held(graph: ModelGraph, role: RankRole) -> str:
    """Which stages this rank has, and from which block to which."""
    words = []
    for number, stage in zip(role.stages, role.held, strict=True):
        start, stop = stage.ops
        blocks = [block.name for block in graph.blocks if block.start < stop and block.stop > start]
        words.append(f"stage {number}" + (f", {blocks[0]} to {blocks[-1]}" if blocks else ""))
    return f" ({'; '.join(words)})" if words else ""


def _in_use(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    used, most = torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
    return f", with {format_bytes(used)} in use and {format_bytes(most)} at most so far"


def _remedy(role: RankRole) -> str:
    largest = max(role.micro_batches.sizes, default=1)
    smaller = (
        f"micro-batches of {largest // 2} in place of {largest} samples keep about half as much (parallelism.micro_batch_sizes); "
        if largest > 1
        else ""
    )
    return (
        f"Next: {smaller}or state less memory for this device in the cluster file (`memory:`) and plan again, so that it gets less of the "
        "model. A job goes on with --resume, under a plan that asks less of this device"
    )
