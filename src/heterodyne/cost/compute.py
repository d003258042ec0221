"""Seconds of forward and backward of a model on one device, for any micro-batch size.

The model is the sum of its blocks; blocks of one kind were measured once. Where the model was also measured in one piece
(the kind `WHOLE`), the sum is scaled to it. The ratio of the two, the *composition*, says what a sum of parts leaves out
(caches that stay warm, kernels that overlap, glue between the blocks) and is kept, so that it can be shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from heterodyne.cluster.profile import WHOLE, DeviceProfile
from heterodyne.cost.curve import Curve
from heterodyne.errors import MeasureError
from heterodyne.graph.ir import ModelGraph

__all__ = ["Compute", "Direction", "compute_of"]

_NO_TIME = 1e-12  # seconds; no clock tells less


@dataclass(frozen=True, kw_only=True)
class Direction:
    """Forward or backward of the whole model.

    Args:
        kinds: seconds of one block of each kind.
        total: seconds of the model; the sum over its blocks, scaled to the model in one piece and to a trial, where there was one.
        composition: the ratio of whole to sum at each size at which both are known; empty if the whole was not measured.
    """

    kinds: Mapping[str, Curve]
    total: Curve
    composition: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Time curves of one device. ``blocks``: the kind of each block, in order."""

    device: str
    blocks: tuple[str, ...]
    forward: Direction
    backward: Direction

    def micro_batch_s(self, size: float) -> float:
        """Seconds of forward and backward of one micro-batch; 0 for none."""
        return self.forward.total(size) + self.backward.total(size)

    def composition(self, size: float) -> float:
        """Seconds of the model over the seconds of its blocks one by one; 1 where the whole was not measured."""
        parts = sum(d.kinds[kind](size) for d in (self.forward, self.backward) for kind in self.blocks)
        return self.micro_batch_s(size) / parts if parts > 0 else 1.0

    def ready_fractions(self, size: float) -> tuple[float, ...]:
        """For each block, the fraction of the model's backward after which the gradients of that block are complete.

        The backward runs the blocks from last to first, so this falls from the first block (1) to the last.
        """
        seconds = [self.backward.kinds[kind](size) for kind in self.blocks]
        done = list(accumulate(reversed(seconds)))[::-1]
        return tuple(part / done[0] if done[0] > 0 else 1.0 for part in done)


def compute_of(graph: ModelGraph, device: str, profile: DeviceProfile) -> Compute:
    """The time curves of a device. Raises MeasureError if a kind of block was not measured on it."""
    missing = [kind for kind in graph.kinds if not profile.blocks.get(kind)]
    if missing or not graph.blocks:
        what = f"block kinds {', '.join(missing)} were not measured" if missing else "the model has no block"
        raise MeasureError(f"{device}: {what}; measure this model again with 'heterodyne measure'")
    return Compute(
        device=device,
        blocks=tuple(block.kind for block in graph.blocks),
        forward=_direction(graph, profile, "forward_s"),
        backward=_direction(graph, profile, "backward_s"),
    )


def _direction(graph: ModelGraph, profile: DeviceProfile, field: str) -> Direction:
    samples = {
        kind: [(float(s.micro_batch_size), float(getattr(s, field))) for s in measured]
        for kind, measured in profile.blocks.items()
        if measured and (kind == WHOLE or kind in graph.kinds)
    }
    whole = Curve.fit(samples.pop(WHOLE)) if WHOLE in samples else None
    kinds = {kind: Curve.fit(points) for kind, points in samples.items()}
    sizes = sorted({size for curve in [*kinds.values(), *([whole] if whole else [])] for size in curve.sizes})
    parts = {size: sum(kinds[block.kind](size) for block in graph.blocks) for size in sizes}
    composition = (
        tuple((size, value / parts[size]) for size, value in whole.points if parts[size] > _NO_TIME) if whole else ()
    )
    # Scaling may bend a curve downwards between two sizes; fitting once more keeps it from falling.
    total = Curve.fit((size, parts[size] * _ratio(composition, size) * profile.calibration) for size in sizes)
    return Direction(kinds=kinds, total=total, composition=composition)


def _ratio(composition: tuple[tuple[float, float], ...], size: float) -> float:
    """Linear between the sizes at which the ratio is known, constant outside them, 1 where nothing is known."""
    if not composition:
        return 1.0
    if size <= composition[0][0]:
        return composition[0][1]
    for (low, before), (high, after) in pairwise(composition):
        if size <= high:
            return before + (after - before) * (size - low) / (high - low)
    return composition[-1][1]
