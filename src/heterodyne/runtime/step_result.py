"""What a step of training came to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from heterodyne.runtime.comm.work import Work
from heterodyne.runtime.exact.weighting import known_loss
from heterodyne.runtime.stages.host_link import Readback

__all__ = ["LateLoss", "StepResult"]


class LateLoss:
    """The loss of a step that has not ended on all ranks.

    Args:
        sums: what `known_loss` reads, once ``sent`` is over: the all-reduce of it.
    """

    def __init__(self, sums: Tensor, sent: Work) -> None:
        self._sums, self._sent = sums, sent
        self._known: float | None = None

    def get(self) -> float:
        """Return it; waits until all ranks have run the forwards of the step. Raises DataError as `known_loss` does."""
        if self._known is None:
            self._sent.wait()
            self._known = known_loss(self._sums[:2])
        return self._known


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to; the same on every rank, but for ``seconds`` and ``samples``.

    Args:
        step: counted from 0.
        told: the loss; what gives it, where the step has not ended on all ranks.
        lr: the learning rate that was used.
        samples: of this rank.
        count: what the loss counts in the global batch (samples, or tokens).
        seconds: of this rank.
        scale: of the loss, where any rank computes in fp16.
        overflow: the step was skipped because the scaled gradients left the range of fp16; the next step has half the scale.
        found: what was not finite, as far as it was known when the step returned; see `fault`.
        late: the norm on its way to the host, where the device has decided by it whether to update; None: the host has.
        slower: which ranks and links are slower than in the first steps, where that was found out in this step; "": none is any more.
            None otherwise.
    """

    step: int
    told: float | LateLoss
    lr: float
    samples: int
    count: float
    seconds: float
    norm: Tensor | None = None
    scale: float | None = None
    overflow: bool = False
    found: str | None = None
    late: Readback | None = None
    slower: str | None = None

    @property
    def loss(self) -> float:
        """The loss of the global batch, exactly as one device would have it. With predicted weights it waits for the other ranks: a script
        that reads it a step later makes none wait."""
        return self.told.get() if isinstance(self.told, LateLoss) else self.told

    @property
    def is_late(self) -> bool:
        """Whether loss or norm are known only when the next step is under way."""
        return self.late is not None or isinstance(self.told, LateLoss)

    @property
    def grad_norm(self) -> float | None:
        """The global norm before clipping; None where the plan has none. Waits for the device."""
        if self.late is not None:
            return self.late.get()[0]
        return None if self.norm is None else self.norm.item()

    @property
    def fault(self) -> str | None:
        """What was not finite in loss or gradients, and where; the step was then skipped: nothing was updated. None otherwise.

        Waits for the device where that has decided by itself; a script that does not ask is told by the next step.
        """
        if self.late is None or math.isfinite(self.late.get()[0]):
            return self.found
        return "the norm of the gradient is not finite; where is looked for if the next step has such a gradient, too"
