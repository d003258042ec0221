"""The samples of all ranks, for a loss that compares them with each other."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from heterodyne.errors import DataError
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.exact.exchange import SampleExchange, over_all_losses

__all__ = ["Gathering"]


class Gathering:
    """Gathers rows over the ranks of ``process_group``, which is used for nothing else. Collective.

    Args:
        weight: what this rank's loss counts in the loss of all, asked for in the backward.
        waiting: what is entered around each exchange.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        weight: Callable[[], float],
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.process_group, self.weight, self.waiting = process_group, weight, waiting

    def rows(self, own: Tensor, *, takes_part: bool) -> Tensor:
        """Return the rows of all ranks in order. Collective, and so is its backward.

        Args:
            own: [samples, ...], with as many samples as this rank has, and other dimensions that are the same on all ranks.
            takes_part: whether this rank's rows are samples of the batch.

        Raises DataError where other dimensions or the dtype differ between ranks.
        """
        if not own.dim():
            raise DataError(
                "all_gather joins rows, and a number has none: write all_gather(value[None]), or mean(loss) for a loss"
            )
        gathered: Tensor = _Rows.apply(own, self, takes_part)  # type: ignore[no-untyped-call]
        return gathered


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, gathering: Gathering, takes_part: bool) -> Tensor:
        group = gathering.process_group
        seen = own if takes_part else own[:0]
        exchange = SampleExchange(group, group.place)
        with gathering.waiting():
            exchange.begin(len(seen), zlib.crc32(f"{own.shape[1:]} {own.dtype}".encode()))
            whole = exchange.rows(seen, 0, 1)
        ctx.gathering, ctx.takes_part = gathering, takes_part
        ctx.first, ctx.shape = exchange.first, own.shape
        if not (own.is_floating_point() or own.is_complex()):
            ctx.mark_non_differentiable(whole)
        return whole

    @staticmethod
    @once_differentiable  # a second derivative would leave out the other ranks
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gathering = ctx.gathering
        with gathering.waiting():
            total = over_all_losses(
                gathering.process_group, upstream.clone(), gathering.weight(), takes_part=ctx.takes_part
            )
        rows = total.narrow(0, ctx.first, ctx.shape[0]) if ctx.takes_part else upstream.new_zeros(ctx.shape)
        return rows, None, None
