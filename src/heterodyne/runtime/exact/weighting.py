"""How much each part of the batch counts, so that unequal parts add up to the loss of one device.

A loss is a sum over the samples, divided by a denominator D(batch). The loss of a part is its sum divided by D(part), so

    loss(batch) = sum over parts of  D(part) / D(batch) * loss(part),

and its gradient is the same sum of gradients. D is computed from statistics that add up over the parts: the number of samples, or
what the loss counts (labels that are not ignored). Where the terms of a loss have denominators of their own, the last stage is given
those of the whole batch, and every weight is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.loss_count import LossCount
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.slices import BatchSource

__all__ = ["NothingCountsError", "Weights", "known_loss", "part_statistics", "sum_of_parts", "weighted_sum"]


class NothingCountsError(DataError):
    """No sample of a global batch has a label that the loss counts."""


class Weights:
    """The weights of this rank's micro-batches in one step.

    Counting tokens takes an all-reduce of a few numbers over all ranks; it is started here, and waited for when a weight or divisor
    is first asked for.

    Args:
        count: of the loss.
        own: the statistics of each micro-batch, ``[1 + n]`` each.
        global_batch_size: all there is to know of the batch, where ``count`` does not read the samples.
        process_group: joins all ranks.
        answers: what this rank counts is not counted by another one too.
    """

    def __init__(
        self,
        count: LossCount,
        own: Sequence[Tensor],
        global_batch_size: int,
        process_group: ProcessGroup,
        *,
        answers: bool = True,
    ) -> None:
        self.own = tuple(own)
        self._count = count
        self._sum = torch.tensor([float(global_batch_size)], dtype=torch.float64)
        self._pending = None
        self._of_statistics: dict[tuple[float, ...], float] = {}
        if count.counts_data:
            nothing = torch.zeros(count.size, dtype=torch.float64)
            self._sum = torch.stack([nothing, *self.own]).sum(0) if answers else nothing
            self._pending = process_group.all_reduce(self._sum)

    def require_some(self) -> None:
        """Raises NothingCountsError if nothing in the whole batch counts: one device would divide by zero."""
        if not self.is_defined:
            raise NothingCountsError(
                "no sample of the global batch has a label that the loss counts, so its mean does not exist: "
                "leave such batches out, or make the global batch larger"
            )

    @cached_property
    def is_defined(self) -> bool:
        """Return whether something in the whole batch counts."""
        return self._count.is_defined(self._whole)

    @property
    def total(self) -> float:
        """Return what the loss counts in the global batch: samples or tokens."""
        return self._count.total(self._whole)

    @cached_property
    def divisors(self) -> Mapping[str, Tensor]:
        """Return what stages are given beside the inputs of the model, where the terms of the loss have denominators of their own."""
        return self._count.divisors(self._whole) if self._count.split else {}

    def of(self, index: int) -> float:
        """The weight of a micro-batch. Raises DataError as `require_some` does."""
        self.require_some()
        own = tuple(self.own[index].tolist())
        if own not in self._of_statistics:  # micro-batches of equal statistics have equal weights
            self._of_statistics[own] = self._count.weight(self.own[index], self._whole)
        return self._of_statistics[own]

    @cached_property
    def _whole(self) -> Tensor:
        if self._pending is not None:
            self._pending.wait()
        return self._sum


def part_statistics(
    count: LossCount, source: BatchSource, spans: Sequence[tuple[int, int]], buffers: Mapping[str, Tensor]
) -> tuple[dict[int, Mapping[str, Tensor]], list[Tensor]]:
    """The statistics of parts of a batch, ``(first sample, count)`` each; and their inputs, where these had to be read for that."""
    if not count.counts_data:
        return {}, [count.statistics({}, size, buffers) for _, size in spans]
    slices = {index: source.samples(*span) for index, span in enumerate(spans) if span[1]}
    nothing = torch.zeros(count.size, dtype=torch.float64)
    own = [count.statistics(slices[index], size, buffers) if size else nothing for index, (_, size) in enumerate(spans)]
    if count.together and len(slices) > 1:  # a replica counts once, however many parts it has
        own = [torch.cat([each[:1], each[1:] / len(slices)]) for each in own]
    return slices, own


def sum_of_parts(
    count: LossCount,
    parts: Sequence[tuple[Sequence[int], Mapping[str, Tensor]]],
    buffers: Mapping[str, Tensor],
    run: Callable[[Mapping[str, Tensor], Sequence[int], float], float],
) -> tuple[float, list[float]] | None:
    """Run the parts of a batch one after the other; return the loss of the whole, and that of each part.

    Args:
        parts: of each, the places of its samples in the batch, and its inputs.
        run: from inputs, places and weight of a part to its loss.

    Returns None, and runs nothing, where nothing in the parts counts. Raises DataError as `known_loss` does.
    """
    own = [count.statistics(inputs, len(samples), buffers) for samples, inputs in parts]
    whole = torch.stack(own).sum(0)
    if not count.is_defined(whole):
        return None
    weights = [count.weight(each, whole) for each in own]
    losses = [run(inputs, samples, weight) for (samples, inputs), weight in zip(parts, weights, strict=True)]
    return known_loss(torch.tensor(weighted_sum(weights, losses), dtype=torch.float64)), losses


def weighted_sum(weights: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """The weighted losses of parts of a batch, added, and how many of them are infinite where nothing counts; see `known_loss`.

    A part that counts nothing has no mean: its loss is 0 / 0, and no part of the sum.
    """
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)
    lost = sum(not weight and math.isinf(loss) for weight, loss in zip(weights, losses, strict=True))
    return total, float(lost)


def known_loss(sums: Tensor) -> float:
    """The loss, from what all ranks found in `weighted_sum` together. Raises DataError if a part has a loss but no denominator."""
    total, lost = sums.tolist()
    if lost:
        raise DataError(
            f"{lost:g} micro-batches count nothing, so their loss is divided by 0, but it is not 0 itself: their gradients are not known. "
            "Let the loss guard its division, for example .sum() / count.clamp(min=1); or make the micro-batches larger"
        )
    return float(total)
