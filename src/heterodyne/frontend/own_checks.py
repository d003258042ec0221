"""Checks that torch makes of values: a trace has no values, so it goes on as if they passed.

``torch.distributions`` and `torch.nn.functional.gaussian_nll_loss` look whether their arguments are valid, and raise if not. The graph is
what they compute with valid ones. Where the module itself runs, its checks run too.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from heterodyne.eager import without_overrides
from heterodyne.frontend.faults import is_foreign

__all__ = ["OwnChecks"]


class OwnChecks(TorchFunctionMode):
    """While active, an ``if`` of torch's own on a tensor, behind which it would raise, goes the way in which it does not."""

    def __torch_function__(  # type: ignore[no-untyped-def]  # as torch declares it
        self, func, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and (passes := _passes(sys._getframe(1))) is not None:
            return passes
        if func is F.gaussian_nll_loss:
            with self:
                return without_overrides(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _passes(frame: FrameType | None) -> bool | None:
    """The value of a condition with which a line of torch does not raise; None if it is no check."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None or not is_foreign(frame.f_code.co_filename):
        return None
    condition, *following = (
        line.strip() for line in linecache.getlines(frame.f_code.co_filename)[frame.f_lineno - 1 :]
    )
    behind = next((line for line in following if line), "")
    condition = condition.removeprefix("el")
    if not condition.startswith("if ") or not condition.endswith(":") or not behind.startswith("raise "):
        return None
    return condition.startswith("if not ")
