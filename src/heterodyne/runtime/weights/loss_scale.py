"""The loss scale of fp16 training, one for all ranks.

fp16 has 5 bits of exponent: gradients below 6e-8 are zero. So the loss is multiplied by a scale before the backward, and the gradients
are divided by it before they are clipped (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2). A step whose
gradients overflow is skipped and the scale halved; after so many good steps in a row it is doubled, as `torch.amp.GradScaler` does.

Ranks of all precisions have the same scale, and gradients are reduced as they are, scaled: an overflow on one rank makes the norm
of the whole gradient infinite, and that norm is what all ranks decide by. A scale is a power of two, so that it changes no bit of
gradients that are in range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LossScale"]

_FIRST = 2.0**15
_GOOD_STEPS = 2000
_SMALLEST = 1.0  # below it, what overflows is the gradient itself
_LARGEST = 2.0**24  # a larger one would gain nothing: fp16 has no smaller number than 2^-24


@dataclass
class LossScale:
    """``value``: that the next step is scaled by; ``good``: steps without an overflow since it was changed."""

    value: float = _FIRST
    good: int = 0

    @torch.no_grad()
    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide them by the scale, in place."""
        found = list(gradients)
        if found:
            torch._foreach_mul_(found, 1.0 / self.value)

    def update(self, *, overflow: bool) -> None:
        """A step is over. The same on every rank."""
        if overflow:
            self.value, self.good = max(self.value / 2, _SMALLEST), 0
            return
        self.good += 1
        if self.good == _GOOD_STEPS:
            self.value, self.good = min(2 * self.value, _LARGEST), 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good": float(self.good)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value, self.good = float(state["value"]), int(state["good"])
