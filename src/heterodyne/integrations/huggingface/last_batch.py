"""The last batch of an epoch, which may be smaller than the global batch that the plan was made for.

It is completed by samples whose labels are -100, which a loss that counts its labels leaves out (``ignore_index``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from heterodyne.api import Distributed
from heterodyne.errors import DataError

__all__ = ["completed", "require_completable"]

_IGNORED = -100
_LABELS = (torch.int64, torch.int32)


def completed(batch: Mapping[str, Tensor], size: int, missing: int, labels: Sequence[str]) -> dict[str, Tensor]:
    """The batch of ``size`` samples and behind them ``missing`` copies of its first one, without labels."""
    made = {}
    for name, tensor in batch.items():
        if tensor.dim() == 0 or tensor.shape[0] != size:
            made[name] = tensor
            continue
        more = tensor[:1].expand(missing, *tensor.shape[1:])
        made[name] = torch.cat([tensor, torch.full_like(more, _IGNORED) if name in labels else more])
    return made


def require_completable(
    distributed: Distributed, model: nn.Module, batch: Mapping[str, Tensor], size: int, labels: Sequence[str]
) -> None:
    """Raises DataError unless samples without labels change nothing. Collective: it evaluates two batches.

    They must leave the loss of the others as it is. Statistics of a batch would take them in.
    """
    remedy = "set dataloader_drop_last=True, or a global batch size that divides the dataset"
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise DataError(f"the last batch is smaller, and BatchNorm would see what completes it: {remedy}")
    named = [name for name in labels if name in batch and batch[name].dtype in _LABELS]
    whole = completed(batch, size, size, named)
    if not named or not math.isclose(distributed.evaluate(batch), distributed.evaluate(whole), rel_tol=1e-5):
        raise DataError(f"the last batch is smaller, and the loss counts samples whose labels are {_IGNORED}: {remedy}")
