"""What a training step does besides the model itself, as far as its cost depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterodyne.job import OptimizerName
from heterodyne.plan.optimizer_state import state_values, values_an_element
from heterodyne.plan.precision import Precisions

__all__ = ["Recipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Args:
    optimizer, momentum: AdamW keeps two values a parameter, each in fp32 or in 8 bits, SGD one if it has momentum, else none; Adafactor
        next to none.
    precision: of all devices or of each kind. In 16 bits it is autocast: parameters, gradients and optimizer stay in their own dtype.
    clip: whether gradients are clipped by their global norm.
    bucket_bytes: gradients are reduced in buckets of about this size.
    """

    optimizer: OptimizerName = "adamw"
    momentum: float = 0.9
    precision: Precisions = "fp32"
    clip: bool = True
    bucket_bytes: int = 4 * 2**20

    @property
    def autocast(self) -> bool:
        """Whether any device keeps 16-bit copies of its weights."""
        return self.precision != "fp32"

    @property
    def narrow(self) -> bool:
        """Whether every device computes in 16 bits."""
        of = [self.precision] if isinstance(self.precision, str) else list(self.precision.values())
        return "fp32" not in of

    @property
    def states(self) -> float:
        """What the optimizer keeps for each parameter, in fp32 values."""
        return values_an_element(self.optimizer, self.momentum)

    def state_values(self, shape: Sequence[int]) -> float:
        """The same of one parameter of that shape, and what does not follow its elements."""
        return state_values(self.optimizer, self.momentum, shape)

    @property
    def update_passes(self) -> int:
        """How often the optimizer step reads or writes something as large as a parameter.

        A fused AdamW reads the parameter, the gradient and two moments, and writes all but the gradient: 7. A fused SGD makes 5 with
        momentum, 3 without. Adafactor reads the gradient for rows, for columns and for the update, writes and reads that twice over to
        clip it, and reads and writes the parameter: 9. In 8 bits the moments are a quarter: 4.
        """
        return {"adamw": 7, "adamw8bit": 4, "sgd": 5 if self.momentum > 0 else 3, "adafactor": 9}[self.optimizer]

    @property
    def prediction_to_step(self) -> float:
        """Seconds of the prediction of weights over seconds of the optimizer step, as the ratio of their memory traffic.

        Op by op, that of AdamW reads and writes 28 times something as large as a parameter, that of SGD with momentum 12 times
        (`heterodyne.runtime.weights.predicted`).
        """
        return {"adamw": 28, "sgd": 12}.get(self.optimizer, 0) / self.update_passes

    @property
    def clip_to_step(self) -> float:
        """Seconds of clipping over seconds of the optimizer step, as the ratio of their memory traffic.

        Clipping reads each gradient for the norm, then reads and writes it to scale it: 3 passes.
        """
        return 3 / self.update_passes if self.clip else 0.0
