"""How a transformer is trained: the degrees of parallelism, the batch, what is kept and what is computed again, and by what software."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heterodyne.predictor.software import Software

__all__ = ["Precision", "Recompute", "Setup"]

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One homogeneous plan. Devices: ``dp * tp * pp * cp``; tensor-parallel groups are neighbours, then context, data, pipeline.

    Args:
        vpp: stages a device (interleaved schedules).
        ep: devices that share the experts, ``etp`` neighbours those that share the matrices of each expert; both taken from dp, cp and tp.
        zero: what is sharded over dp and cp: 1 states, 2 gradients too, 3 parameters too. ``shards``: neighbours among which states are, at
            level 1; 0: all replicas.
        micro_batch: sequences. ``global_batch``: sequences.
        recompute: ``selective``: the inside of attention; ``full``: all of a layer but its input. ``recompute_layers``: the part of the
            layers for which that is so.
        sequence_parallel: norms and dropouts on slices of the sequence between tensor-parallel parts.
        partition: layers of each stage, in order; empty: as `layers_of_stages` deals them.
        schedule: ``1F1B``, ``GPipe``, ``Interleaved1F1B``, ``ZBH1``, ``ZBH2``.
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
    shards: int = 0
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    recompute_layers: float = 1.0
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

    @property
    def replicas(self) -> int:
        """Devices with the same weights, those of experts aside."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """Devices with the same experts, or the same part of them."""
        return max(1, self.dp * self.cp * self.tp // (self.ep * self.etp))

    @property
    def gathers_each_pass(self) -> bool:
        """Whether parameters are gathered for every forward and every backward, not once a step."""
        return self.zero == 3 and not (self.pp > 1 and self.software.keeps_gathered)

    @property
    def element_bytes(self) -> int:
        """Of a weight or an activation."""
        return 4 if self.precision in ("fp32", "tf32") else 2
