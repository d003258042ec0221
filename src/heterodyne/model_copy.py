"""Copies of a model, also of one in which an earlier forward has left tensors with a history."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["copied"]

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
        vars(memo[id(tensor)]).update(vars(tensor))
    return made


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
