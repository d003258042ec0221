"""The plan of a published run, as its source states it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heterodyne.predictor.setup import Precision
from heterodyne.predictor.software import Software

__all__ = ["Recompute", "RowPlan"]

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One homogeneous plan. Devices: ``dp * tp * pp * cp``; tensor-parallel groups are neighbours, then context, data, pipeline.

    Args:
        vpp: stages a device (interleaved schedules).
        ep: devices that share the experts, ``etp`` neighbours those that share the matrices of each expert; both taken from dp, cp and tp.
        zero: what is sharded over dp and cp: 1 states, 2 gradients too, 3 parameters too.
        micro_batch: sequences. ``global_batch``: sequences.
        recompute: ``selective``: the inside of attention; ``full``: all of a layer but its input. ``recompute_part``: of a layer, the part
            for which that is so.
        sequence_parallel: norms and dropouts on slices of the sequence between tensor-parallel parts.
        partition: layers of each stage, in order; empty: as `layers_of_stages` deals them.
        schedule: ``1F1B``, ``ZBH1``, ``ZBH2``; where there is more than one stage a device, ``Interleaved1F1B``.
    """

    global_batch: int
    micro_batch: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 0
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    recompute_part: float = 1.0
    sequence_parallel: bool = False
    partition: tuple[int, ...] = ()
    schedule: str = "1F1B"
    software: Software = field(default_factory=Software)

    @property
    def micro_batches(self) -> int:
        """Of one pipeline, in a step; at least one."""
        return max(1, -(-self.global_batch // (self.micro_batch * self.dp)))

    def layers_of_stages(self, layers: int) -> tuple[int, ...]:
        """How many layers each stage has: evenly, the embedding and the head counted as a layer each where only that
        comes out even, the stages in the middle with one more where nothing does. A partition that is told is taken as it is."""
        if self.partition:
            return self.partition
        stages = self.pp * self.vpp
        each, left = divmod(layers, stages)
        if left and (layers + 2) % stages == 0:
            each, left = (layers + 2) // stages, -2
        found = [each] * stages
        if left < 0:
            found[0] -= 1
            found[-1] -= 1
        first = (stages - left) // 2
        for stage in range(first, first + max(0, left)):
            found[stage] += 1
        return tuple(found)
