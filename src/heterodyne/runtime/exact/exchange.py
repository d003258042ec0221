"""What replicas exchange for a loss in which the samples of all of them see each other.

Each replica computes the loss L of the whole batch, and with weight 1 / R of R replicas its backward gives dL / (R dx) for
what was exchanged. A replica's own rows x enter L once, so their gradient is R times its rows of that; a sum over the replicas
passes its gradient on to each, R times as well. Weights that the tail reads get 1 / R of their gradient on each replica, which the
reduction of gradients adds up.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.runtime.comm.process_group import ProcessGroup

__all__ = ["SampleExchange", "over_all_losses"]


_SENT_AS = {torch.bool: torch.uint8, torch.int16: torch.int32}  # no backend adds up these


def over_all_losses(process_group: ProcessGroup, of_own: Tensor, weight: float, *, takes_part: bool) -> Tensor:
    """Return what the gradient of this rank's loss would be if it were the loss of all ranks, of which it is ``weight``. Collective.

    With gradients g_s of the losses of ranks s, which count w_s, that is sum_s w_s g_s / w, because the reduction multiplies what follows
    from it by w. A rank that takes no part in the batch has weight 0, and gets the sum, which goes nowhere.

    Args:
        of_own: the gradient of this rank's loss by something that all ranks have computed together; written over.
        takes_part: whether samples of this rank are in it.

    Raises DataError for a loss that counts nothing and yet is reached by those of other ranks.
    """
    weighted = of_own.mul_(weight) if weight else torch.zeros_like(of_own)  # a loss that counts nothing may be NaN
    process_group.all_reduce(weighted).wait()
    if not weight and takes_part:
        raise DataError(
            "the loss of this rank counts nothing in this batch, but those of other ranks depend on its samples (through BatchNorm or "
            "all_gather), and their gradients would be lost: give each rank samples that count, or leave such samples out on all ranks"
        )
    return weighted.div_(weight) if weight else weighted


class SampleExchange:
    """Among the replicas of ``process_group``, in order of their samples in the global batch; None: this one alone.

    Args:
        position: of this replica in that order.
    """

    def __init__(self, process_group: ProcessGroup | None, position: int) -> None:
        self._process_group = process_group
        self._position = position
        self._count = 1 if process_group is None else len(process_group.ranks)
        self.first = 0
        """Where its samples begin in the global batch."""
        self._whole = 0

    def begin(self, samples: int, kind: int = 0) -> int:
        """Tell how many samples this replica has; how many all have together. Collective.

        Raises DataError, on every rank, if they are not of the same ``kind``.
        """
        where = None if self._process_group is None else self._process_group.works_on
        counts = torch.zeros(2, self._count, dtype=torch.int64, device=where)
        counts[:, self._position] = torch.tensor([samples, kind])
        if self._process_group is not None:
            self._process_group.all_reduce(counts).wait()
        each, kinds = counts.tolist()
        if len(set(kinds)) > 1:
            raise DataError(
                "the ranks bring rows of unlike shapes or dtypes; only the first dimension may differ: pad the others to one length"
            )
        self.first = [0, *accumulate(each)][self._position]
        self._whole = sum(each)
        return self._whole

    def rows(self, tensor: Tensor, dim: int, rows: int) -> Tensor:
        """The samples of all replicas, where ``dim`` has ``rows`` entries for each. Collective, forward only."""
        if self._process_group is None:
            return tensor
        start, length = self.first * rows, self._whole * rows
        gathered: Tensor = _Rows.apply(tensor, dim, start, length, self._process_group, self._count)  # type: ignore[no-untyped-call]
        return gathered

    def total(self, tensor: Tensor, weight: float) -> Tensor:
        """The sum over the replicas of ``weight * tensor``. Collective, forward only."""
        if self._process_group is None:
            return tensor * weight if tensor.is_floating_point() else tensor
        total: Tensor = _Total.apply(tensor, weight, self._process_group, self._count)  # type: ignore[no-untyped-call]
        return total


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, dim: int, start: int, length: int, process_group: ProcessGroup, replicas: int
    ) -> Tensor:
        ctx.cut = dim, start, own.shape[dim], replicas
        # Rows of others are zero here, so the sum over the replicas is each row as it was.
        whole = own.new_zeros([length if at == dim else size for at, size in enumerate(own.shape)])
        whole.narrow(dim, start, own.shape[dim]).copy_(own)
        sent = whole.to(_SENT_AS.get(whole.dtype, whole.dtype))
        process_group.all_reduce(sent).wait()
        found = sent.to(own.dtype)
        if not (own.is_floating_point() or own.is_complex()):
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dim, start, count, replicas = ctx.cut
        return (upstream.narrow(dim, start, count) * replicas, *([None] * 5))


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, weight: float, process_group: ProcessGroup, replicas: int) -> Tensor:
        ctx.scale = weight * replicas
        total = own * weight if own.is_floating_point() else own.clone()
        process_group.all_reduce(total).wait()
        if not own.is_floating_point():
            ctx.mark_non_differentiable(total)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (upstream * ctx.scale, *([None] * 3))
