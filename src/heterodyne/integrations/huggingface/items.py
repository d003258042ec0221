"""What the Trainer hands around of a batch whose parts are unequal: its number of items, and its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heterodyne.drop_in.sampler import Dealt, dealt_of

__all__ = ["Items", "LossOfSamples", "countable", "is_idle"]


class Items(Tensor):
    """A number that notes whether it was read."""

    is_read = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ not in ("__get__", "dim", "size"):
            for each in (*args, *kwargs.values()):
                if isinstance(each, Items):
                    each.is_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class LossOfSamples(Tensor):
    """The loss of a global batch, which the Trainer repeats for each sample of a rank to take the mean over the data."""

    dealt: Dealt | None = None

    def repeat(self, *sizes: Any) -> Tensor:
        return self.as_subclass(Tensor).repeat(*(sizes if self.dealt is None else (max(1, self.dealt.own),)))


def is_idle(inputs: Any) -> bool:
    """Return whether this is a sample that only keeps a rank in step with the others."""
    dealt = dealt_of(inputs)
    return dealt is not None and not dealt.own


def countable(batch: Any) -> Any:
    """Return a batch of which the Trainer counts the items that are this rank's."""
    if not is_idle(batch):
        return batch
    labels = {name: batch[name] for name in ("labels", "shift_labels") if isinstance(batch.get(name), Tensor)}
    return {**batch, **{name: torch.full_like(each, -100) for name, each in labels.items()}}
