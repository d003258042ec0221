"""The cost of every possible stage on every device, as tables over the cut points of the model.

Time and activations of a stage are sums over its segments, the ops between neighbouring cut points; segments at the same place of alike
blocks are costed once. Parameters count once per stage, however many of its ops read them. Memory errs upwards; the plans that result
are costed exactly and simulated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from heterodyne.cost.compute import Pass
from heterodyne.cost.model import CostModel
from heterodyne.graph.ir import Parameter
from heterodyne.search.points import Points

__all__ = ["Floats", "PlaceTable", "Tables"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PlaceTable:
    """Of one place; entry ``[i, j]`` is about the stage from point i to point j, where ``i < j``.

    Args:
        step_s: seconds of forward, backward, recompute and update in a step.
        lack_bytes: what is missing of memory, even if all that can be is recomputed; 0 where it fits.
    """

    step_s: Floats
    lack_bytes: Floats


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """Bytes of the parameters of every stage: all, gradients, optimizer states, the largest one in fp32."""

    stored: Floats
    gradients: Floats
    states: Floats
    largest: Floats


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables for one set of points; each is made once. ``like``: for devices that are as good as another one, which."""

    model: CostModel
    points: Points
    like: Mapping[str, str] = field(default_factory=dict)
    _tables: dict[tuple[str, tuple[tuple[int, int], ...], int], PlaceTable] = field(
        default_factory=dict, repr=False, compare=False
    )
    _seconds: dict[tuple[str, Pass, int], Floats] = field(default_factory=dict, repr=False, compare=False)
    _kept: dict[tuple[str, int], Floats] = field(default_factory=dict, repr=False, compare=False)
    _space: dict[tuple[str, int, bool], Floats] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, device: str, kind: Pass, size: int) -> Floats:
        """Seconds of one micro-batch from the beginning of the model to each point."""
        key = (device, kind, size)
        if key not in self._seconds:
            compute = self.model.compute[device]
            self._seconds[key] = self.sums(lambda ops: compute.seconds(kind, ops, size) if size else 0.0)
        return self._seconds[key]

    def kept(self, device: str, size: int) -> Floats:
        """Bytes of the activations of one micro-batch from the beginning of the model to each point."""
        key = (device, size)
        if key not in self._kept:
            memory = self.model.device_memory[device]
            self._kept[key] = self.sums(lambda ops: float(memory.activations(size, ops)))
        return self._kept[key]

    def table(self, device: str, sizes: Mapping[int, int], in_flight: int) -> PlaceTable:
        """Of one device for micro-batches of these sizes (``{size: how many}``), so many of them in flight at a time."""
        device = self.like.get(device, device)
        key = (device, tuple(sorted(sizes.items())), in_flight)
        if key not in self._tables:
            self._tables[key] = self._table(device, sizes, in_flight)
        return self._tables[key]

    def _table(self, device: str, sizes: Mapping[int, int], in_flight: int) -> PlaceTable:
        largest = max(sizes)
        passes = sum(
            (
                count * (self.seconds(device, "F", size) + self.seconds(device, "B", size))
                for size, count in sizes.items()
            ),
            start=np.zeros(len(self.points)),
        )
        step = _differences(passes) + self.update_s(device)
        over = self.over(device, largest, in_flight)
        # What is lacking is made again instead of kept: the more is lacking, the more of the forward runs twice.
        frees, again_s, held_again = self._again(device, sizes)
        frees = np.maximum(0.0, in_flight * frees - held_again)
        short = np.maximum(0.0, over)
        part = np.divide(short, frees, out=np.zeros_like(short), where=frees > 0)
        return PlaceTable(
            step_s=step + np.where(short > 0, np.minimum(1.0, part) * again_s, 0.0),
            lack_bytes=np.maximum(0.0, short - frees),
        )

    def holds_any(self, device: str, size: int) -> bool:
        """Whether the device has room for any stage at all, one micro-batch of that size at a time."""
        count = len(self.points)
        lack = self.table(device, {size: 1}, 1).lack_bytes
        return bool((lack[np.triu_indices(count, 1)] <= 0).any())

    def update_s(self, device: str) -> Floats:
        """Seconds of clipping and of the optimizer step of every stage."""
        clip = 1 + self.model.recipe.clip_to_step
        return np.multiply(self._weights.gradients, self.model.measured(device).optimizer_s_per_byte * clip)

    def over(self, device: str, size: int, in_flight: int) -> Floats:
        """Bytes that every stage lacks on the device if nothing is recomputed; less than 0 where it has them left."""
        return self.needs(device, size, in_flight) - self.model.cluster.device(device).memory_bytes

    def least_over(self, device: str, size: int) -> Floats:
        """The same in the order that holds least: one micro-batch at a time, its backward in halves."""
        return self.needs(device, size, 1, halves=True) - self.model.cluster.device(device).memory_bytes

    def needs(self, device: str, size: int, in_flight: int, *, halves: bool = False) -> Floats:
        """Bytes of the peak of every stage, with so many micro-batches of that size in flight, if nothing is recomputed.

        ``halves``: of backwards in halves, which leave no holes.
        """
        weights, memory = self._weights, self.model.device_memory[device]
        frame = memory.use(0, ()).context
        handed = 0.0 if memory.tells_peaks else weights.largest
        tensors = weights.stored + weights.gradients + self.model.recipe.states * weights.states + handed
        crossing = np.array([size_(size) for size_ in self.points.crossing])
        sides = crossing[:, None] + crossing[None, :]
        kept = (_differences(self.kept(device, size)) + sides) * (1 + memory.lost_part)
        most = in_flight * kept + self._workspace(device, size, halves) + 2 * sides
        fixed: Floats = tensors * (1 + memory.lost_part) + frame
        peak: Floats = fixed + np.maximum(most, weights.largest)
        return peak

    def _workspace(self, device: str, size: int, halves: bool) -> Floats:
        key = (device, size, halves)
        if key not in self._space:
            memory = self.model.device_memory[device]
            own = self._own(lambda ops: float(memory.workspace(size, ops) + (0 if halves else memory.holes(size, ops))))
            count = len(self.points)
            most = np.zeros((count, count))
            for first in range(count - 1):
                most[first, first + 1 :] = np.maximum.accumulate(own[first:])
            self._space[key] = most
        return self._space[key]

    def _again(self, device: str, sizes: Mapping[int, int]) -> tuple[Floats, Floats, float]:
        """If every whole block is recomputed: bytes that a micro-batch does not keep, seconds of a step, bytes of the largest block."""
        positions = self.points.positions
        borders = [block.start for block in self.model.graph.blocks] + [positions[-1]]
        largest = max(sizes)
        compute, memory = self.model.compute[device], self.model.device_memory[device]
        alive = dict(zip(positions, self.points.crossing, strict=True))
        frees, seconds, dropped = [0.0], [0.0], [0.0]
        known: dict[str, tuple[float, float, float]] = {}
        for block in self.model.graph.blocks:
            if block.kind not in known:
                ops = (block.start, block.stop)
                held = memory.activations(largest, ops)
                inputs = alive[block.start](largest) if block.start in alive else float(held)
                spent = sum(count * compute.seconds("F", ops, size) for size, count in sizes.items())
                known[block.kind] = (max(0.0, held - inputs), spent, float(held))
            free, spent, held_bytes = known[block.kind]
            frees.append(frees[-1] + free)
            seconds.append(seconds[-1] + spent)
            dropped.append(held_bytes)
        first = [bisect_left(borders, position) for position in positions]
        last = [bisect_right(borders, position) - 1 for position in positions]
        whole = [np.array(values) for values in (frees, seconds)]
        bytes_, spent_s = (np.maximum(0.0, values[last][None, :] - values[first][:, None]) for values in whole)
        return bytes_, spent_s, max(dropped)

    @cached_property
    def _weights(self) -> _Weights:
        """By walking from every point to the end, each parameter counted where it is first read."""
        count = len(self.points)
        graph = self.model.graph
        named: dict[str, Parameter] = {p.name: p for p in (*graph.parameters, *graph.buffers)}
        read = [
            list(dict.fromkeys(n for op in graph.ops[a:b] for n in op.parameters if n in named))
            for a, b in pairwise(self.points.positions)
        ]
        anywhere = {name for names in read for name in names}

        def sizes(p: Parameter) -> tuple[float, float, float, float]:
            wide = max(p.bytes, 4 * p.numel)
            return (p.bytes, p.bytes, wide, wide) if p.trainable else (p.bytes, 0, 0, 0)

        of = {name: np.array(sizes(p), dtype=np.float64) for name, p in named.items()}
        base = [of[name] for name in named if name not in anywhere]
        tables = np.zeros((4, count, count))
        for first in range(count - 1):
            seen: set[str] = set()
            total = np.sum(base, axis=0) if base else np.zeros(4)
            largest = max((value[3] for value in base), default=0.0)
            for stop, names in enumerate(read[first:], start=first + 1):
                for name in names:
                    if name not in seen:
                        seen.add(name)
                        total = total + of[name]
                        largest = max(largest, of[name][3])
                tables[:, first, stop] = (*total[:3], largest)
        return _Weights(stored=tables[0], gradients=tables[1], states=tables[2], largest=tables[3])

    def sums(self, value: Callable[[tuple[int, int]], float]) -> Floats:
        """A value of the ops between neighbouring points, added up from the beginning of the model to each point."""
        return np.concatenate(([0.0], np.cumsum(self._own(value))))

    def _own(self, value: Callable[[tuple[int, int]], float]) -> Floats:
        """The value of each segment."""
        known: dict[object, float] = {}
        values = []
        for key, ops in zip(self._segments, pairwise(self.points.positions), strict=True):
            if key not in known:
                known[key] = value(ops)
            values.append(known[key])
        return np.array(values)

    @cached_property
    def _segments(self) -> Sequence[object]:
        """What distinguishes segments: the kind of the block and where in it they lie; by themselves if over more than a block."""
        blocks = self.model.graph.blocks
        starts = [block.start for block in blocks]
        keys: list[object] = []
        for start, stop in pairwise(self.points.positions):
            block = blocks[bisect_right(starts, start) - 1]
            inside = stop <= block.stop
            keys.append((block.kind, start - block.start, stop - block.start) if inside else (start, stop))
        return keys


def _differences(sums: Floats) -> Floats:
    """From sums up to each point to those of every stage."""
    return sums[None, :] - sums[:, None]
