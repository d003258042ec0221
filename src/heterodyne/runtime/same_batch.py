"""Whether every rank was given the same global batch: looked at on the first steps, and then now and then.

A DistributedSampler that was left in a script, a shuffling DataLoader without a seed, or a stream that shards itself by rank gives each
rank another batch. Each would take its slice of its own, and train on data that nobody asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.runtime.slices import BatchSource, is_source

__all__ = ["digest", "is_looked_at", "require_same"]

_FIRST = 3
_EVERY = 100
_MOST = 4096


def is_looked_at(step: int) -> bool:
    """The first steps, those with a power of two as number, and each hundredth."""
    return step < _FIRST or step % _EVERY == 0 or step & (step - 1) == 0


def digest(batch: Mapping[str, Tensor] | BatchSource) -> str | None:
    """Of names, shapes, types and a few thousand values of each tensor, spread over all of it; what a source of samples says of itself
    (``digest``), None if it says nothing.
    """
    if is_source(batch):
        said: str | None = getattr(batch, "digest", None)
        return said
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in batch.items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        values = tensor.detach().reshape(-1)
        sample = values[:: max(1, values.numel() // _MOST)].contiguous().cpu()
        if sample.numel():
            found.update(sample.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def require_same(digests: Sequence[str | None], step: int, *, given: bool = True) -> None:
    """Raises DataError if the batches of the ranks differ. ``given``: as tensors, and not read by each rank from a dataset or stream."""
    others = [rank for rank, found in enumerate(digests) if found != digests[0]]
    if others:
        ranks = f"rank {others[0]} has" if len(others) == 1 else f"ranks {', '.join(map(str, others))} have"
        what = f"the batches of step {step} differ: {ranks} another one than rank 0. "
        if not given:
            raise DataError(
                f"{what}Let the dataset or stream be the same on every rank, which takes its own samples of it: the same number of "
                "samples in the same order, not sharded by rank, and shuffled from one seed only"
            )
        raise DataError(
            f"{what}Pass the whole global batch, the same on every rank, "
            "which takes its own share of it: take a DistributedSampler out, and let a DataLoader that shuffles do so from one seed "
            "(generator=torch.Generator().manual_seed(0)); to read on each rank only its own samples pass a BatchSource"
        )
