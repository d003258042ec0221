"""Decisions made once for all ranks, and joint failure: an error of one rank is raised on every rank.

Without it a full disk on rank 0 would leave the others in a collective until its timeout. It has a gloo group of its own: that carries
small Python objects on any backend, and may wait longer than a training step (files take their time). Waiting is bounded all the same: a
rank that died breaks its connections at once, one that hangs is given up after the timeout.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.comm.objects import Objects

__all__ = ["Agreement"]

T = TypeVar("T")

FILES_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreement:
    """The ranks of a job, or one process alone (``group`` None, ``size`` 1). ``objects``: of that group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    objects: Objects

    @classmethod
    def of_all(cls, timeout_s: float = FILES_TIMEOUT_S, *, key: bytes = b"") -> Agreement:
        """Of all ranks of the default process group, which must all call this; of this process if there is no group. ``key``: see
        `Objects`.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls.alone()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(group=group, rank=dist.get_rank(), size=dist.get_world_size(), objects=Objects(group, key))

    @classmethod
    def alone(cls) -> Agreement:
        """Of this process."""
        return cls(group=None, rank=0, size=1, objects=Objects(None, b""))

    def on_rank0(self, do: Callable[[], T]) -> T:
        """Rank 0 does it, every rank gets the result (pickled), or raises the HeterodyneError that came of it."""
        if self.size == 1:
            return do()
        result: T = _value(self.objects.broadcast(_attempt(do) if self.rank == 0 else None, 0))
        return result

    def only_on_rank0(self, do: Callable[[], T]) -> T | None:
        """As `on_rank0`, but the result stays on rank 0 and need not be picklable; the others get None."""
        kept: list[T] = []
        self.on_rank0(lambda: kept.append(do()))
        return kept[0] if kept else None

    def gather_or_raise(self, do: Callable[[], T]) -> list[T]:
        """Every rank does it; all results in order of rank, or on every rank the first HeterodyneError of any of them."""
        if self.size == 1:
            return [do()]
        return [_value(box) for box in self.objects.gather(_attempt(do))]

    def ask(self, flag: Callable[[], bool]) -> Callable[[], bool]:
        """Start to ask whether it is so on any rank; the answer is waited for when it is called for.

        What happens in between costs nothing: nobody waits for anybody here. With several ranks the flag is looked at now.
        """
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag())])
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(flags.item())

        return answer


@dataclass(frozen=True)
class _Failed:
    error: HeterodyneError


def _attempt(do: Callable[[], T]) -> T | _Failed:
    try:
        return do()
    except HeterodyneError as error:
        error.__cause__ = None  # what caused it need not survive pickling
        return _Failed(pickle.loads(pickle.dumps(error)))


def _value(box: Any) -> Any:
    if isinstance(box, _Failed):
        box.error.shared = True
        raise box.error
    return box
