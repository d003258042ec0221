"""What an optimizer does to weights outside of its step, brought to the copies of them that the model computes with.

The ``eval()`` of a schedule-free optimizer, a swap to averaged weights, or a sync of slow ones moves what the optimizer holds. Where that
is a range of a weight, other ranks have that range too; where it is a copy in fp32 or on the host, the model has another one. After a step
these get the new values; after such a move they get them here, at the next call that all ranks make.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from heterodyne.errors import PlanError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.weights.gradients import GradientBuckets
from heterodyne.runtime.weights.left import Left
from heterodyne.runtime.weights.masters import MasterWeights

__all__ = ["OutsideMoves"]


class OutsideMoves:
    """Of one rank. Making one, `bring_together` and `settle` are collective.

    Args:
        gathered: the buckets of this rank that a step gathers after its update, in that order.
        sharded: the names of the weights that one rank updates and others hold, too.

    ``marked``: whether a move was seen since the last step, on any rank; then another is likely to come before the next one.

    A step would pay for asking all ranks before it, so it begins with what this rank knows by itself, and tells of moves along with its
    loss (`told`). If weights were a mixture on any rank (`settle`), nothing is updated, and it is done again.
    """

    def __init__(
        self,
        masters: MasterWeights,
        gradients: GradientBuckets,
        communicator: Communicator,
        gathered: Sequence[int],
        sharded: Collection[str],
    ) -> None:
        self._masters = masters
        self._gradients = gradients
        self._communicator = communicator
        self._gathered = gathered
        self._watched = {n: t for n, t in masters.updated.items() if n in masters.apart or n in sharded}
        self._left = Left(self._watched)
        self._read: Left | None = None
        self._anywhere = any(communicator.all_gather_object(bool(self._watched)))
        self._moved = False  # so that others have to be asked
        self._late = False  # the step under way began with other weights
        self._other_values: Tensor | bool | None = None
        self._fault: str | None = None
        self.marked = False

    def watch_reads(self) -> None:
        """From here on `are_stale` is asked before the script reads weights between two calls, and `written` is called after each read."""
        self._read = Left(self._watched)

    def are_stale(self) -> bool:
        """Whether this rank's optimizer has moved weights outside of its step that the ranks have not exchanged."""
        return self._moved or (self._read is not None and self._read.is_other())

    def written(self) -> None:
        """What has changed since `are_stale` was asked was written by the script to the model's own weights, which ranks hold whole."""
        if self._read is not None and self._read.is_counted():
            self._read.leave()

    def leave(self) -> None:
        """A step has left the weights as they are; what the optimizer moves from here on is outside of it."""
        self.marked = False
        self._leave()

    def _leave(self) -> None:
        self._left.leave()
        if self._read is not None:
            self._read.leave()

    def begin(self) -> bool:
        """A step begins: the model gets what was moved of copies, as far as writes are counted; values are compared meanwhile.

        Return whether weights may have been written to.
        """
        if self.marked:
            self.bring_together()
        elif self._left.is_counted():
            self._give()
        else:
            self._other_values = self._left.has_other_values()
            return False
        return True

    def told(self) -> bool:
        """Whether all ranks have to ask each other (`settle`) before the step that has begun updates anything."""
        if self._other_values is not None and self._other_values:
            self._late = self._give()
        self._other_values = None
        return self._moved

    def _give(self) -> bool:
        """Give the model what was moved of copies; whether there was any."""
        names = self._left.changed()
        self._fault = self._masters.give(name for name in names if name in self._masters.apart) or self._fault
        given = not self._masters.own_memory.isdisjoint(names)
        self._moved |= bool(names) and (given or bool(self._gathered) or self._fault is not None)
        self._leave()
        return given

    def bring_together(self) -> None:
        """All copies of a weight become what the optimizer that updates it has made of it. Collective.

        Raises PlanError, on all ranks, where that cannot be on one of them.
        """
        if not self._anywhere:
            return
        self._give()
        moved = torch.tensor([float(self._moved)], dtype=torch.float64)
        self._communicator.control.all_reduce(moved).wait()
        if moved.item():
            self.marked = True
            if self.settle():
                self.spread()

    def settle(self) -> bool:
        """Whether ranks hold other values of one weight, or began the step under way with others, so that `spread` is needed. Collective.

        Raises PlanError as `bring_together`.
        """
        own = (self._gradients.byte_sums(self._gathered), self._late, self._fault)
        of_all = self._communicator.all_gather_object(own)
        self._moved = self._late = False
        self._fault = None
        fault = next((fault for *_, fault in of_all if fault is not None), None)
        if fault is not None:
            raise PlanError(fault)
        first: dict[int, int] = {}
        unlike = [first.setdefault(bucket, found) != found for sums, *_ in of_all for bucket, found in sums.items()]
        return any(unlike) or any(late for _, late, _ in of_all)

    @torch.no_grad()
    def spread(self) -> None:
        """Exchange the weights of each bucket as after a step. Collective."""
        with self._masters.writing():
            for bucket in self._gathered:
                self._gradients.gather(bucket)
            self._gradients.wait_gathered()
        self._leave()
