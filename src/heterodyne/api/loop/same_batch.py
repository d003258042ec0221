"""Whether every rank was given the same global batch: looked at on the first steps, and then now and then.

A DistributedSampler that was left in a script, or a shuffling DataLoader without a seed, gives each rank another batch. Each would take
its slice of its own, and train on data that nobody asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.runtime.meeting.communicator import Communicator

__all__ = ["digest", "is_looked_at", "require_same"]

_FIRST = 3
_EVERY = 100
_MOST = 4096


def is_looked_at(step: int) -> bool:
    """The first steps, those with a power of two as number, and each hundredth."""
    return step < _FIRST or step % _EVERY == 0 or step & (step - 1) == 0


def digest(batch: Mapping[str, Tensor]) -> str:
    """Of names, shapes, types and a few thousand values of each tensor, spread over all of it."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in batch.items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().reshape(-1)
        sample = values[:: max(1, values.numel() // _MOST)].contiguous().cpu()
        if sample.numel():
            found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def require_same(batch: Mapping[str, Tensor], communicator: Communicator, step: int) -> None:
    """Collective. Raises DataError on every rank if their batches differ."""
    digests = communicator.all_gather_object(digest(batch))
    others = [rank for rank, found in enumerate(digests) if found != digests[0]]
    if others:
        ranks = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others))} have"
        raise DataError(
            f"the batches of step {step} differ: {ranks} another one than rank 0. Pass the whole global batch, the same on every rank, "
            "which takes its own share of it: take a DistributedSampler out, and let a DataLoader that shuffles do so from one seed "
            "(generator=torch.Generator().manual_seed(0)); to read on each rank only its own samples pass a BatchSource"
        )
