"""What a step of training came to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["StepResult"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to; the same on every rank, but for ``seconds`` and ``samples``.

    Args:
        step: counted from 0.
        loss: of the global batch, exactly as one device would have it.
        lr: the learning rate that was used.
        samples: of this rank.
        count: what the loss counts in the global batch (samples, or tokens).
        seconds: of this rank.
        scale: of the loss, where any rank computes in fp16.
        overflow: the step was skipped because the scaled gradients left the range of fp16; the next step has half the scale.
        fault: what was not finite in loss or gradients, and where; the step was then skipped: nothing was updated. None otherwise.
        slower: which ranks and links are slower than in the first steps, where that was found out in this step; "": none is any more.
            None otherwise.
    """

    step: int
    loss: float
    lr: float
    samples: int
    count: float
    seconds: float
    norm: Tensor | None = None
    scale: float | None = None
    overflow: bool = False
    fault: str | None = None
    slower: str | None = None

    @property
    def grad_norm(self) -> float | None:
        """The global norm before clipping; None on idle ranks. Waits for the device."""
        return None if self.norm is None else self.norm.item()
