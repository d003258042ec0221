"""Lower bounds on step time and memory of sharded plans, without working out the layouts of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from heterodyne.cost.compute import Pass
from heterodyne.cost.layers import Way
from heterodyne.cost.model import CostModel
from heterodyne.cost.sharded_stage import ShardedStageCost
from heterodyne.errors import MeasureError, PlanError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline, Stage
from heterodyne.search.planned import CUTTING_PAYS, IN_TURNS_PAYS
from heterodyne.units import counted, format_bytes

__all__ = ["SplitBound"]

_DIRECTIONS: tuple[Pass, ...] = ("F", "B")


@dataclass(frozen=True, kw_only=True)
class SplitBound:
    """Two devices exchange less than more of them do: the tensors are the same, and in a ring of n each sends (n - 1) / n of them. What two
    devices do not divide, more do not either, and each of them does it.

    Args:
        samples: the global batch.
        in_turns: whether halves of micro-batches may run in turns, so that one computes while the other exchanges.
        stage: the whole model on some devices, in one way, with some shares.
    """

    model: CostModel
    samples: int
    in_turns: bool
    stage: Callable[[tuple[int, int], Sequence[str], Way, tuple[int, ...]], Stage]
    _pairs: dict[tuple[Way, tuple[str, str], int], tuple[float, float]] = field(default_factory=dict, repr=False)

    def weighed_s(self, kind: Way, groups: Sequence[Sequence[str]], size: int) -> float:
        """Seconds of a step, and what is doubtful about it, under micro-batches of that size: the devices of a group are done with what
        they compute at the same time, and exchange what the two that are joined best would.
        """
        waiting, turning = 0.0, 0.0  # samples/s
        for group in groups:
            exchanged_s, undivided = (
                self._of_pair(kind, self._joined_best(group), size) if len(group) > 1 else (0.0, 0.0)
            )
            speed = sum(size / self.model.compute[device].micro_batch_s(size) for device in group)
            compute_s = size * (1 + (len(group) - 1) * undivided) / speed
            waiting += size / (compute_s + exchanged_s)
            turning += size / max(compute_s, exchanged_s)
        least = self.samples / waiting / CUTTING_PAYS
        turns = self.in_turns and size > 1
        return min(least, self.samples / turning / (CUTTING_PAYS * IN_TURNS_PAYS)) if turns else least

    def lacking(self, kind: Way, groups: Sequence[Sequence[str]]) -> str:
        """Why weights, gradients and optimizer state alone have no room, together or where each device has all of them; "" if they have."""
        parts = [[device] for group in groups for device in group] if kind == "context" else groups
        for devices in parts:
            there = sum(self.model.cluster.device(device).memory_bytes for device in devices)
            uses = [self.model.memory_use(device, 0) for device in devices]
            least = min(use.parameters + use.gradients + use.optimizer for use in uses)
            if least > there:
                who = f"{devices[0]} has" if len(devices) == 1 else f"{counted(len(devices), 'device')} have"
                return f"weights, gradients and optimizer state take {format_bytes(least)}, and {who} {format_bytes(there)}"
        return ""

    def _joined_best(self, group: Sequence[str]) -> tuple[str, str]:
        """The first two of a group whose link is the best."""
        send, size = self.model.collectives.send, self.model.graph.trainable_bytes
        return min(combinations(group, 2), key=lambda pair: send(*pair)(size))

    def _of_pair(self, kind: Way, pair: tuple[str, str], size: int) -> tuple[float, float]:
        """Seconds of what two exchange in forward and backward of a micro-batch, and the part of the operations that they do not divide;
        nothing if they cannot share the model."""
        key = (kind, pair, size)
        if key not in self._pairs:
            stage = self.stage((0, len(self.model.graph.ops)), pair, kind, (1, 1))
            pipeline = Pipeline(micro_batches=MicroBatches((size,)), stages=(stage,))
            try:
                together = self.model.sharded_stage(pipeline, 0)
            except (PlanError, MeasureError):
                together = None
            self._pairs[key] = (0.0, 0.0) if together is None else _exchanged_and_undivided(together, size)
        return self._pairs[key]


def _exchanged_and_undivided(together: ShardedStageCost, size: int) -> tuple[float, float]:
    divided = {name for name, strategy in together.sharding.strategies.items() if strategy.divides}
    flops = {op.name: op.flops_forward(size) + op.flops_backward(size) for op in together.graph.ops}
    kept = sum(own for name, own in flops.items() if name not in divided)
    exchanged_s = sum(together.together_s(direction, size)[1] for direction in _DIRECTIONS)
    return exchanged_s, kept / max(1.0, sum(flops.values()))
