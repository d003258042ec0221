"""What no step of devices that share layers or sequences is shorter than, without working out how their tensors lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal

from heterodyne.cost.model import CostModel
from heterodyne.errors import MeasureError, PlanError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline, Stage

__all__ = ["SplitBound"]

Kind = Literal["split", "context"]


@dataclass(frozen=True, kw_only=True)
class SplitBound:
    """Two devices exchange less than more of them do: the tensors are the same, and in a ring of n each sends (n - 1) / n of them.

    Args:
        samples: the global batch.
        speed: samples of the whole model that a device computes in a second.
        stage: the whole model on some devices, in one way, with some shares.
    """

    model: CostModel
    samples: int
    speed: Callable[[str], float]
    stage: Callable[[tuple[int, int], Sequence[str], Kind, tuple[int, ...]], Stage]
    _exchanged: dict[tuple[Kind, tuple[str, str], int], float] = field(default_factory=dict, repr=False)

    def step_s(self, kind: Kind, groups: Sequence[Sequence[str]], size: int) -> float:
        """Seconds, under micro-batches of that size: all devices compute all the time, but for what the two of each group that are joined
        best would exchange."""
        samples_per_s = 0.0
        for group in groups:
            exchanged_s = self._exchanged_s(kind, self._joined_best(group), size) if len(group) > 1 else 0.0
            samples_per_s += size / (exchanged_s + size / sum(map(self.speed, group)))
        return self.samples / samples_per_s

    def _joined_best(self, group: Sequence[str]) -> tuple[str, str]:
        """The first two of a group whose link is the best."""
        send, size = self.model.collectives.send, self.model.graph.trainable_bytes
        return min(combinations(group, 2), key=lambda pair: send(*pair)(size))

    def _exchanged_s(self, kind: Kind, pair: tuple[str, str], size: int) -> float:
        """Of forward and backward of one micro-batch; 0 if two cannot share the model."""
        key = (kind, pair, size)
        if key not in self._exchanged:
            stage = self.stage((0, len(self.model.graph.ops)), pair, kind, (1, 1))
            pipeline = Pipeline(micro_batches=MicroBatches((size,)), stages=(stage,))
            try:
                together = self.model.in_parts(pipeline, 0)
            except (PlanError, MeasureError):
                together = None
            ways = () if together is None else [together.together_s(direction, size) for direction in ("F", "B")]
            self._exchanged[key] = sum(exchanged_s for _, exchanged_s in ways)
        return self._exchanged[key]
