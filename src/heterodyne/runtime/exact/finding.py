"""What a comparison of one form of a model with a plain call has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from heterodyne.model_output import LOSS

__all__ = ["BAR", "Finding", "Form"]

BAR = 1e-5
Form = Literal["parts", "cut"]
"""``parts``: the module, fed in parts of the batch (where samples see each other in the loss: the graph in their place, in one part).
``cut``: the captured graph in two stages, fed in the same parts."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """How far one form of the model is from one plain call.

    Args:
        parts: samples of each part of the batch.
        empty_first: the first part counts nothing in the loss.
        losses: of the form, and of the plain call.
        loss_error: relative.
        errors: of each gradient, relative, in the order in which the forward reads the parameters.
        largest: of all errors.
        beyond: the parameters whose errors are more than rounding, in the same order; ``loss`` is one of them if its error is.
        woken: buffers and entries of the batch that are zero, and were not for this comparison.
        failure: the words of what was raised, where it does not run at all.
    """

    form: Form
    parts: tuple[int, ...]
    empty_first: bool = False
    losses: tuple[float, float] = (0.0, 0.0)
    loss_error: float = 0.0
    errors: Mapping[str, float] = field(default_factory=dict)
    largest: float = 0.0
    beyond: tuple[str, ...] = ()
    woken: tuple[str, ...] = ()
    failure: str = ""

    @property
    def agrees(self) -> bool:
        return not self.beyond and not self.failure

    @property
    def all_errors(self) -> list[tuple[str, float]]:
        """Of the loss, and of each gradient."""
        return [(LOSS, self.loss_error), *self.errors.items()]
