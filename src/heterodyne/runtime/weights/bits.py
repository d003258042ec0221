"""Whether tensors are, bit for bit, what they were: also where autograd counts nothing, as in ``p.data.clamp_()``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["sums_of_bits"]

_WORD = 8


@torch.no_grad()
def sums_of_bits(tensors: Iterable[Tensor]) -> list[int]:
    """For each the sum of its words of 64 bits, which wraps around. One pass over the memory, and one wait for each device."""
    sums = [_sum(tensor.detach()) for tensor in tensors]
    together: dict[torch.device, list[int]] = {
        device: torch.stack([each for each in sums if each.device == device]).tolist()
        for device in {each.device for each in sums}
    }
    return [together[each.device].pop(0) for each in sums]


def _sum(tensor: Tensor) -> Tensor:
    found = tensor.contiguous().view(-1).view(torch.uint8)
    before = -int(found.storage_offset()) % _WORD  # words lie at whole places of the memory that a tensor is part of
    stop = before + max(0, found.numel() - before) // _WORD * _WORD
    ends = torch.cat([found[:before], found[stop:]]).long()
    ends = ends << 8 * (torch.arange(len(ends), device=ends.device) % _WORD)  # as words of their own
    return ends.sum() + found[before:stop].view(torch.int64).sum() if stop > before else ends.sum()
