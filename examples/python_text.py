"""Text that every machine with Python has: the sources of its standard library, as bytes."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def sequences(step: int, count: int, length: int) -> dict[str, Tensor]:
    """``count`` sequences of ``length`` bytes for one step, [count, length], as Hugging Face models take them. The same on every rank."""
    corpus = _corpus()
    starts = torch.randint(len(corpus) - length, (count,), generator=torch.Generator().manual_seed(step))
    ids = torch.stack([corpus[start : start + length] for start in starts.tolist()])
    return {"input_ids": ids, "labels": ids}


@functools.cache
def _corpus() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.int64)
