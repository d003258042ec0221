"""Selective recompute: outputs of chosen ops are kept, and not recomputed.

An op is a call between `begin` and `end`. A dispatch mode below autograd notes its outputs in the first run, and returns them in the
second instead of computing. Autograd is above that and does the same both times, so it saves the same tensors in the same order. Views
are made again, since holding one would hold its base, and so are casts: autocast may take those of weights from its cache or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from heterodyne.errors import HeterodyneError

__all__ = ["KeptOutputs"]

_CAST = torch.ops.aten._to_copy.default


class KeptOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch, as below
    """Of one run, and of the one that repeats it after `replay`. What was given back is let go of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: deque[tuple[OpOverload, Any]] = deque()
        self._again = False
        self._open = False

    def replay(self) -> None:
        """The run that follows is the second one."""
        self._again = True

    def clear(self) -> None:
        """Nothing is asked for any more."""
        self._made.clear()

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]
        self._open = True

    def end(self) -> None:
        """Behind an op; also where an error has left it."""
        if self._open:
            self._open = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is _CAST or any(r.alias_info is not None for r in func._schema.returns):
            return func(*args, **(kwargs or {}))
        if not self._again:
            made = func(*args, **(kwargs or {}))
            self._made.append((func, _aliases(made)))
            return made
        if not self._made or self._made[0][0] is not func:
            raise HeterodyneError(
                f"run again, an op that was kept computes {func} first, and did not the first time: it goes another way each time. "
                "Let it do the same, or leave it out of 'keep'"
            )
        return _aliases(self._made.popleft()[1])


def _aliases(made: Any) -> Any:
    """Without the graph that autograd is going to hang on what was made."""
    return tree_map_only(Tensor, Tensor.detach, made)
