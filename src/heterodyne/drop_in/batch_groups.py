"""Global batches that are several batches of any batch sampler, dealt by shares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from heterodyne.drop_in.sampler import Dealt, DistributedSampler
from heterodyne.errors import HeterodyneError
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["BatchGroups"]


class BatchGroups(DistributedSampler):
    """Deals by shares what so many batches in a row have together, as rank 0's batch sampler draws them.

    Args:
        batches: any batch sampler, of all samples.
        ranks: how many of its batches make a global one.

    Raises HeterodyneError for one without a length, and for one that has samples of a rank only.
    """

    def __init__(self, batches: Any, ranks: int, communicator: Communicator, shares: Sequence[float] | None) -> None:
        super().__init__(range(0), communicator.world_size, communicator.rank, shuffle=False, shares=shares)
        self.batch_sampler, self._ranks, self._communicator = batches, ranks, communicator
        self.drop_last = bool(getattr(batches, "drop_last", False))
        self.skips = 0  # global batches of the next epoch
        self._total = communicator.world_size  # samples of the batch that was handed out last
        self.read_ahead()
        for each in (batches, getattr(batches, "sampler", None)):
            if getattr(each, "num_replicas", 1) > 1:
                raise HeterodyneError(
                    f"a {type(each).__name__} gives each rank samples of its own, and these would be dealt once more: leave it out"
                )
        if not hasattr(batches, "__len__"):
            raise HeterodyneError(
                f"a {type(batches).__name__} without __len__ may have no end, so nobody knows which global batch is the last: give it one"
            )

    @property
    def global_batch_size(self) -> int:
        size = getattr(self.batch_sampler, "batch_size", None)
        return size * self._ranks if size else self._total

    def __len__(self) -> int:
        groups, rest = divmod(len(self.batch_sampler), self._ranks)
        return groups + (rest > 0 and not self.drop_last)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        samplers: tuple[Any, ...] = (self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        for each in samplers:
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)

    def batches(self, begin: int) -> Iterator[tuple[int, Sequence[int]]]:
        skips, self.skips = self.skips, 0
        rank = self._communicator.rank
        drawn = iter(self._communicator.broadcast_object([] if rank else list(map(list, self.batch_sampler)), 0))
        end = 0
        for number in range(len(self)):
            batch = [index for each in islice(drawn, self._ranks) for index in each]
            first, end = max(begin, end), end + len(batch)
            if number >= skips and first < end:
                yield first, batch[first - end :]

    def hand_out(self) -> Dealt:
        dealt = super().hand_out()
        self._total = dealt.total
        return dealt
