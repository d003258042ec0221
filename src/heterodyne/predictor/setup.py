"""How the devices of one stage run a layer: how they share its work, how much of it there is, and by what software."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from heterodyne.predictor.software import Software

__all__ = ["Precision", "Setup"]

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Neighbours share matrices; groups of them the sequence; experts are spread over all.

    Args:
        micro_batch: sequences of a device at a time, parts of them where the sequence is shared.
        tp: tensor parallelism. cp: context parallelism.
        ep: devices that share the experts, ``etp`` neighbours those that share the matrices of each expert.
        accumulates: whether gradients of several micro-batches are added up.
        sequence_parallel: norms and dropouts on slices of the sequence between tensor-parallel parts.
        selective: whether the inside of attention is computed again where its scores are written out (Korthikanti et al., 2022).
    """

    micro_batch: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    accumulates: bool = True
    precision: Precision = "bf16"
    sequence_parallel: bool = False
    selective: bool = False
    software: Software = field(default_factory=Software)

    @property
    def element_bytes(self) -> int:
        """Of a weight or an activation."""
        return 4 if self.precision in ("fp32", "tf32") else 2

    @property
    def gradient_bytes(self) -> int:
        """Of an element of a gradient, as it is kept."""
        return 4 if self.element_bytes == 4 else self.software.gradient_bytes

    @property
    def state_bytes(self) -> int:
        """That the optimizer keeps, a parameter."""
        return 8 if self.element_bytes == 4 else self.software.state_bytes
