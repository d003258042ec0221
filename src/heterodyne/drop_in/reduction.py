"""The gradients of the global batch: DDP's buckets, each multiplied by this rank's weight and added up over the ranks.

PyTorch's reducer collects gradients into buckets and hands each one, as it is full, to `GradientReduction.reduce`; what comes back are
the gradients of the mean over the global batch.

Micro-batches that are accumulated under ``no_sync`` are in ``.grad`` unweighted, and get the weight of the last one when they are reduced.
Where weights differ, `follow` rescales what is there by w_old / w_new before the next backward, so that each counts by its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.drop_in.loss_weight import LossWeight
from heterodyne.drop_in.pace import Pace
from heterodyne.runtime.comm.process_group import ProcessGroup

__all__ = ["GradientReduction"]

_SHARED_FROM = 2**20  # bytes of all gradients from which the barriers of shared memory cost less than sockets


class GradientReduction:
    """The gradients of one model.

    Args:
        process_group: of all ranks, for nothing else.
        scale: of each rank's gradients where its loss is a part of a sum over the global batch; None: its weight.
    """

    def __init__(self, process_group: ProcessGroup, parameters: list[nn.Parameter], *, scale: float | None) -> None:
        self.pace = Pace(parameters[0].device if parameters else torch.device("cpu"))
        self.weight: LossWeight | None = None
        self.told = False  # the weight was said, and holds until the next reduction
        self._process_group = process_group
        self._parameters = parameters
        self.scale = scale
        self._unsynced: LossWeight | None = None  # of what has been accumulated and not reduced
        self._set_aside: dict[nn.Parameter, Tensor] = {}  # weighted: what is kept while the weight is 0
        self._sizes: dict[int, tuple[int, torch.dtype]] = {}
        self._shared: dict[int, Tensor] = {}
        self._reductions = 0

    def factor(self) -> float:
        """By what the gradients of this rank are multiplied."""
        assert self.weight is not None
        return self._factor_of(self.weight)

    def _factor_of(self, weight: LossWeight) -> float:
        """Its weight; for a sum the scale, but 0 for a batch that is not this rank's."""
        return weight.value if self.scale is None else self.scale * (weight.own > 0)

    def prepare(self) -> None:
        """Take the memory for the buckets, once PyTorch has settled on them. Collective, between two reductions."""
        if self._reductions != 2 or self._shared or not self._process_group.neighbours:
            return  # PyTorch makes its buckets anew, once, behind the first backward
        self._reductions += 1
        if sum(elements * dtype.itemsize for elements, dtype in self._sizes.values()) >= _SHARED_FROM:
            buffers = self._process_group.buffers(list(self._sizes.values()))
            self._shared = dict(zip(self._sizes, buffers, strict=True))

    def follow(self, weight: LossWeight, *, accumulates: bool) -> None:
        """Let the next backward count by this weight, and what has been accumulated before by its own."""
        before, self.weight = self._unsynced, weight
        if accumulates or before is not None:
            self._unsynced = weight
        if before is None or before is weight:
            return
        old, new = self._factor_of(before), self.factor()
        if old == new:
            return
        filled = {p: p.grad for p in self._parameters if p.grad is not None}
        if old and new:
            for gradient in filled.values():
                gradient.mul_(old / new)
            return
        if old:
            self._set_aside = {parameter: gradient.mul_(old) for parameter, gradient in filled.items()}
        for parameter in filled:  # what counts nothing may be NaN
            parameter.grad = None
        if new:
            for parameter, weighted in self._set_aside.items():
                parameter.grad = weighted.div_(new)
            self._set_aside = {}

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start the sum of a bucket of gradients (a `torch.distributed.GradBucket`) over the ranks, by weight."""
        last = bucket.is_last()
        if last:
            self.pace.note_launch()
        gradients, index, factor = bucket.buffer(), bucket.index(), self.factor()
        shared = self._shared.get(index)
        if shared is not None and (shared.numel(), shared.dtype) == (gradients.numel(), gradients.dtype):
            reduced = torch.mul(gradients, factor, out=shared) if factor else shared.zero_()
        elif factor:
            reduced = gradients if factor == 1 else gradients.mul_(factor)
        else:
            reduced = gradients.zero_()
        if self._set_aside and not factor:
            self._add_what_is_set_aside(bucket, reduced)
        if self._reductions < 2:
            self._sizes[index] = (gradients.numel(), gradients.dtype)
        if last:
            self._unsynced, self.told = None, False
            self._set_aside = {}
            self._reductions += self._reductions < 2
            if self._reductions == 1:
                self._sizes = {}
        return self._process_group.all_reduce_future(reduced, self.pace.note_end)

    def _add_what_is_set_aside(self, bucket: Any, reduced: Tensor) -> None:
        begin = 0
        for parameter in bucket.parameters():
            found: Any = self._set_aside.get(parameter)
            if found is not None:
                reduced[begin : begin + parameter.numel()].add_(found.reshape(-1))
            begin += parameter.numel()
