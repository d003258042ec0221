"""Seconds of stages from any layer to any other, where they fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from heterodyne.search.fleet.arrays import Floats, Ints, between
from heterodyne.search.fleet.tables import Table

__all__ = ["StageCosts"]


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of the stages of one kind. Arrays have the shape [first layer, layer before which it ends].

    Args:
        plain_s: seconds of a micro-batch. ``again_s``: with recompute. Infinite where there is no layer.
        held: micro-batches in flight for which there is memory. ``held_again``: with recompute.
    """

    plain_s: Floats
    again_s: Floats
    held: Floats
    held_again: Floats

    @classmethod
    def of(cls, table: Table, memory_bytes: float, replicas: int, zero: int, *, recompute: bool) -> StageCosts:
        """``replicas``: pipelines that share state at the ZeRO level. ``recompute``: stages may be recomputed."""
        level = zero if replicas * table.widths.copies > 1 else 0
        forward, backward, recomputed = (between(own.tolist()) for own in table.passes)
        plain = forward + backward
        plain[np.tri(len(plain), dtype=bool)] = np.inf
        return cls(
            plain_s=plain,
            again_s=plain + recomputed if recompute else np.full_like(plain, np.inf),
            held=table.most_held(level, replicas, memory_bytes, recompute=False),
            held_again=table.most_held(level, replicas, memory_bytes, recompute=True),
        )

    def seconds(self, held: int | Ints, part: tuple[slice, slice] = (slice(None), slice(None))) -> Floats:
        """Of a micro-batch, if so many are in flight; infinite where a stage does not fit.

        ``held``: broadcast to the pairs of layers. ``part``: the first layers, and those before which stages end.
        """
        again_s = np.where(self.held_again[part] >= held, self.again_s[part], np.inf)
        found: Floats = np.where(self.held[part] >= held, self.plain_s[part], again_s)
        return found

    def fits_plain(self, held: int) -> NDArray[np.bool_]:
        """Whether a stage fits without recompute."""
        found: NDArray[np.bool_] = self.held >= held
        return found
