"""How much of the global batch this rank's loss stands for.

The loss of rank r is its sum over its own samples divided by its own count n_r, so the loss of the global batch is

    sum over ranks of  n_r / N * loss_r,        N = sum of n_r,

and its gradient is the same sum of gradients. Multiplying by n_r / N before the sum needs N, which is known where the loader has dealt
the batch, and comes from an all-reduce of one number beside the forward elsewhere. (To add up n_r * gradient and n_r and divide at the
end would need no N, but overflows in 16 bits and passes over every gradient once more.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from heterodyne.errors import DataError, HeterodyneError
from heterodyne.runtime.comm.process_group import ProcessGroup

__all__ = ["Count", "LossCount", "LossWeight", "count_of", "samples_in"]

LossCount: TypeAlias = Literal["samples", "tokens", "shifted tokens", "sum", "ranks"] | Callable[..., float]
"""What the loss divides by; a function gets the arguments of forward."""
Count: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], float]
_IGNORED = -100  # the ignore_index that torch's losses have by default


class LossWeight:
    """This rank's part of one global batch.

    Args:
        own: what the loss divides by on this rank.
        total: over all ranks; None: they add it up, beginning now. Collective then.
    """

    __slots__ = ("_pending", "_sum", "_value", "own")

    def __init__(self, own: float, total: float | None, process_group: ProcessGroup) -> None:
        self.tell(own, total, process_group)

    def tell(self, own: float, total: float | None, process_group: ProcessGroup) -> None:
        """Replace what was said of this batch before."""
        self.own = own
        self._value = None if total is None else own / total
        if total is None:
            self._sum = torch.tensor([own], dtype=torch.float64)
            self._pending = process_group.all_reduce(self._sum)

    @property
    def value(self) -> float:
        """By what the loss of this rank, or its gradient, is multiplied. Raises DataError where nothing counts on any rank."""
        if self._value is None:
            self._pending.wait()
            total = self._sum.item()
            if not total:
                raise DataError(
                    "nothing in the global batch counts, on no rank, so the mean of its loss does not exist: leave such batches out, "
                    "or say what the loss divides by with loss_count= or count()"
                )
            self._value = self.own / total
        return self._value


def samples_in(value: Any) -> int | None:
    """The leading size of the first tensor in the arguments of a forward; None where there is none."""
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for part in parts if (found := samples_in(part)) is not None), None)


def count_of(loss_count: LossCount, forward: Callable[..., Any]) -> Count:
    """Return what counts in the arguments of ``forward``. Raises HeterodyneError for a word that is not known."""
    if callable(loss_count):
        counted = loss_count
        return lambda inputs, keywords: _number(counted(*inputs, **keywords))
    if loss_count in ("samples", "sum", "ranks"):
        return _samples
    if loss_count in ("tokens", "shifted tokens"):
        signature, first = inspect.signature(forward), int(loss_count == "shifted tokens")

        def tokens(inputs: Sequence[Any], keywords: Mapping[str, Any]) -> float:
            labels = keywords.get("labels")
            labels = signature.bind(*inputs, **keywords).arguments.get("labels") if labels is None else labels
            if not isinstance(labels, Tensor):
                raise HeterodyneError(
                    f"loss_count={loss_count!r} counts the entries of the argument 'labels' that are not {_IGNORED}, and forward got none: "
                    "pass a function of the arguments of forward, or call count(n) before the backward"
                )
            return float((labels[..., first:] != _IGNORED).sum())

        return tokens
    raise HeterodyneError(
        f"loss_count is {loss_count!r}; it is 'samples', 'tokens', 'shifted tokens' (the model shifts its labels by one), 'sum', "
        "'ranks' (a sum times the number of ranks), or a function of the arguments of forward"
    )


def _samples(inputs: Sequence[Any], keywords: Mapping[str, Any]) -> float:
    found = samples_in((*inputs, *keywords.values()))
    if found is None:
        raise HeterodyneError(
            "forward got no tensor with a leading size, so the number of samples is not known: call count(n) before the backward, or pass "
            "loss_count= a function of the arguments of forward"
        )
    return found


def _number(value: Any) -> float:
    number = float(value)
    if not 0 <= number < float("inf"):
        raise HeterodyneError(f"a count of {number:g}: what a loss divides by is finite and not negative")
    return number
