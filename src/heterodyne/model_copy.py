"""Copies of a model, also of one in which an earlier forward has left tensors with a history."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["attributes_of", "copied"]

_OF_COPIES: MutableMapping[Tensor, dict[str, Any]] = WeakTensorKeyDictionary()
"""By a copy, the attributes that it was given: a tensor without data has attributes of torch's own besides."""

Module = TypeVar("Module", bound=nn.Module)


def copied(
    model: Module, memo: dict[int, Any] | None = None, of_history: Callable[[Tensor], Tensor] | None = None
) -> Module:
    """Return a deep copy. PyTorch refuses to copy a tensor that was computed from others; here its values are copied.

    Args:
        memo: by the id of an object, what takes its place.
        of_history: gives what takes the place of a computed tensor; None: its values.
    """
    memo = {} if memo is None else memo
    with _Values(of_history or (lambda tensor: tensor.detach().clone())):
        made = copy.deepcopy(model, memo)
    for tensor in (*model.parameters(), *model.buffers()):  # whose attributes PyTorch does not copy
        if own := attributes_of(tensor):
            vars(memo[id(tensor)]).update(own)
            _OF_COPIES[memo[id(tensor)]] = own
    return made


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that a script has given a weight, or the one of which this is a copy."""
    return _OF_COPIES.get(tensor, {}) if isinstance(tensor, FakeTensor) else dict(vars(tensor))


class _Values(TorchFunctionMode):
    def __init__(self, of_history: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._of_history = of_history

    def __torch_function__(  # type: ignore[no-untyped-def]  # as torch declares it
        self, func, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), self._of_history(tensor))
        return func(*args, **(kwargs or {}))
