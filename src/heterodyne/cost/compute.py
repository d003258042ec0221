"""Seconds of forward and backward of a model, or of a stage, on one device, for any micro-batch size.

The model is the sum of its blocks; blocks of one kind are measured once. Where the whole model was measured too (the kind `WHOLE`), the
sum is scaled to it. Their ratio, the *composition*, is what a sum of blocks leaves out (warm caches, kernels that overlap, glue between
the blocks).

A stage is the sum of its blocks, scaled alike, so the stages of a pipeline add up to the model. A block that is cut inside counts by the
FLOPs of the ops on each side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import Literal

from heterodyne.cluster.profile import WHOLE, DeviceProfile
from heterodyne.cost.backward_split import BackwardSplit
from heterodyne.cost.curve import Curve
from heterodyne.errors import MeasureError
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.size import Size

__all__ = ["Compute", "Direction", "Pass", "compute_of"]

_NO_TIME = 1e-12  # seconds; no clock tells less

Pass = Literal["F", "B", "I", "W", "H"]
"""H: a forward whose backward comes in the halves I and W."""


@dataclass(frozen=True, kw_only=True)
class Direction:
    """The forward or the backward of the whole model.

    Args:
        kinds: seconds of one block of each kind.
        total: seconds of the model: the sum over its blocks, scaled to the whole model and to a trial, where there were any.
        composition: the ratio of whole to sum at each size where both are known; empty if the whole was not measured.
    """

    kinds: Mapping[str, Curve]
    total: Curve
    composition: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Time curves of one device.

    Args:
        graph: the model.
        forward, backward: of the whole model.
        halves: for the kinds of blocks that were also measured in halves: seconds of H, of I and of W. Where a block has many small
            products, the halves take clearly more than the whole.
    """

    device: str
    graph: ModelGraph
    forward: Direction
    backward: Direction
    halves: Mapping[str, tuple[Curve, Curve, Curve]] = field(default_factory=dict)
    _split: BackwardSplit
    _borders: dict[tuple[Pass, float], tuple[float, ...]] = field(default_factory=dict, repr=False, compare=False)
    _reached: dict[tuple[Pass, int, float], float] = field(default_factory=dict, repr=False, compare=False)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The kind of each block, in order."""
        return tuple(block.kind for block in self.graph.blocks)

    def micro_batch_s(self, size: float) -> float:
        """Seconds of forward and backward of one micro-batch; 0 for none."""
        return self.forward.total(size) + self.backward.total(size)

    def rate(self, sizes: Iterable[float] | None = None) -> float:
        """Samples per second of forward and backward at the best of these micro-batch sizes; None: of those that were measured."""
        seconds = {size: self.micro_batch_s(size) for size in sizes or self.forward.total.sizes}
        return max(size / own if own > 0 else inf for size, own in seconds.items())

    def seconds(self, kind: Pass, ops: tuple[int, int], size: float) -> float:
        """Seconds of the ops ``[start, stop)`` for a micro-batch of ``size`` samples; I and W are the halves of B."""
        return max(0.0, self._until(kind, ops[1], size) - self._until(kind, ops[0], size))

    def ready_fraction(self, position: int, ops: tuple[int, int], size: float) -> float:
        """The fraction of the backward of the ops ``[start, stop)`` after which that of ``[position, stop)`` is done."""
        whole = self.seconds("B", ops, size)
        position = min(max(position, ops[0]), ops[1])
        return self.seconds("B", (position, ops[1]), size) / whole if whole > 0 else 1.0

    def _until(self, kind: Pass, position: int, size: float) -> float:
        """Seconds of all ops before ``position``."""
        key = (kind, position, size)
        if key not in self._reached:
            borders, reached = self._block_borders(kind, size), 0.0
            for block, low, high in zip(self.graph.blocks, borders, borders[1:], strict=False):
                if position <= block.start:
                    break
                part = 1.0 if position >= block.stop else self._part(kind, block.start, position, block.stop, size)
                reached = high if part == 1.0 else low + part * (high - low)
            self._reached[key] = reached
        return self._reached[key]

    def _block_borders(self, kind: Pass, size: float) -> tuple[float, ...]:
        """Seconds of all blocks before each block, and of all."""
        key = (kind, size)
        if key not in self._borders:
            direction = self.forward if kind in ("F", "H") else self.backward
            whole = [direction.kinds[name](size) for name in self.blocks]
            parts = whole if kind in ("F", "B") else self._halved(kind, whole, size)
            summed = sum(whole)
            # The model as a whole is taken as it is, not as a sum that differs from it in the last digit.
            total, scale = direction.total(size), direction.total(size) / summed if summed > 0 else 0.0
            borders = list(accumulate((part * scale for part in parts), initial=0.0))
            self._borders[key] = (*borders[:-1], total if kind in ("F", "B") else borders[-1])
        return self._borders[key]

    def _halved(self, kind: Pass, whole: list[float], size: float) -> list[float]:
        """H, I or W of each block as measured; otherwise H as F, and the backward split by FLOPs."""
        flops = {"I": self._split.input_flops, "W": self._split.weight_flops}
        halves = []
        for block, seconds in zip(self.graph.blocks, whole, strict=True):
            if block.kind in self.halves:
                halves.append(self.halves[block.kind]["HIW".index(kind)](size))
                continue
            if kind == "H":
                halves.append(seconds)
                continue
            own = {half: Size.total(of[block.start : block.stop])(size) for half, of in flops.items()}
            together = own["I"] + own["W"]
            # A block without any operations that count has no weights to speak of.
            part = own[kind] / together if together > 0 else float(kind == "I")
            halves.append(seconds * part)
        return halves

    def _part(self, kind: Pass, start: int, position: int, stop: int, size: float) -> float:
        """The fraction of a block's seconds that its ops before ``position`` take."""
        if kind in ("I", "W"):
            sizes = (self._split.input_flops if kind == "I" else self._split.weight_flops)[start:stop]
        else:
            ops = self.graph.ops[start:stop]
            sizes = tuple(op.flops_forward if kind in ("F", "H") else op.flops_backward for op in ops)
        flops = [flop(size) for flop in sizes]
        if sum(flops) <= 0:
            return (position - start) / (stop - start)
        return sum(flops[: position - start]) / sum(flops)


def compute_of(graph: ModelGraph, device: str, profile: DeviceProfile) -> Compute:
    """The time curves of a device. Raises MeasureError if a kind of block was not measured on it."""
    missing = [kind for kind in graph.kinds if not profile.blocks.get(kind)]
    if missing or not graph.blocks:
        what = f"block kinds {', '.join(missing)} were not measured" if missing else "the model has no block"
        raise MeasureError(f"{device}: {what}; measure this model again with 'heterodyne measure'")
    return Compute(
        device=device,
        graph=graph,
        forward=_direction(graph, profile, "forward_s"),
        backward=_direction(graph, profile, "backward_s"),
        halves=_halves(graph, profile),
        _split=BackwardSplit(graph),
    )


def _halves(graph: ModelGraph, profile: DeviceProfile) -> dict[str, tuple[Curve, Curve, Curve]]:
    halves = {}
    for kind in graph.kinds:
        known = [s for s in profile.blocks[kind] if s.input_s > 0 or s.weight_s > 0]
        if known:
            of = [
                (float(s.micro_batch_size), (s.halved_forward_s or s.forward_s, s.input_s, s.weight_s)) for s in known
            ]
            forward, inputs, weights = (Curve.fit((size, seconds[n]) for size, seconds in of) for n in range(3))
            halves[kind] = (forward, inputs, weights)
    return halves


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
