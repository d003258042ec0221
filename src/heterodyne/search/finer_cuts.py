"""Cuts of a pipeline whose devices and their order are known, at finer points than the borders of blocks.

One stage on each pipeline rank, or two: in a loop, or down the ranks and back again. The bottleneck rank is done soonest, by dynamic
programming (`least_cut`) on the measured seconds of each device, which may be as unlike as they are. Where a rank lacks memory for the
micro-batches that are in flight, it gets so much less, until each fits by the account of the cost model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise, product
from math import inf
from typing import TypeAlias

import numpy as np

from heterodyne.cost.compute import Pass
from heterodyne.cost.model import CostModel
from heterodyne.graph.size import Size
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline
from heterodyne.plan.schedules.schedule import Placement, stage_places
from heterodyne.search.classes import first_of, interchangeable
from heterodyne.search.fleet.arrays import Floats
from heterodyne.search.fleet.cutter import least_cut
from heterodyne.search.orders import peak_of_all_kept
from heterodyne.search.points import MOST_CROSSING, Points, points_of
from heterodyne.search.predict import plan_of, stage_of

__all__ = ["FinerCuts", "made_of"]

Line: TypeAlias = tuple[str, ...]
"""Devices by pipeline rank."""
_MOST_POINTS = 220
_MOST_INSIDE = 4
_BELIEVED = 0.99  # of the seconds of a line, below which an estimate of another one is believed
_PARTS: tuple[tuple[Pass, ...], ...] = (("F", "B"), ("H", "I"))
_ROUNDS = 4  # of cuts for memory: each knows what the one before lacked


@dataclass(frozen=True, kw_only=True)
class FinerCuts:
    """Cuts of one model on the devices of one cluster. ``tied_together``: what reads one weight is in one stage."""

    model: CostModel
    tied_together: bool = False
    _seconds: dict[tuple[str, Pass, int], Floats] = field(default_factory=dict, repr=False)
    _activations: dict[tuple[str, int], Floats] = field(default_factory=dict, repr=False)

    @cached_property
    def points(self) -> Points:
        """The borders of blocks, and points inside of them as far as there are not too many."""
        blocks = len(self.model.graph.blocks)
        inside = max(0, min(_MOST_INSIDE, (_MOST_POINTS - blocks) // max(1, blocks)))
        return points_of(self.model.graph, inside=inside, most_crossing=MOST_CROSSING, tied_together=self.tied_together)

    def shapes(self, pipeline: Pipeline, idle: Sequence[str] = ()) -> Iterator[Pipeline]:
        """The pipeline cut anew, with one stage on each rank and with two; none where there are too few points.

        ``idle``: devices that may join, wherever in the pipeline they shorten it.
        """
        line, micro_batches = tuple(devices[0] for devices in pipeline.places), pipeline.micro_batches
        if len(self.points) <= len(line):
            return
        lines = _Lines(cuts=self, micro_batches=micro_batches)
        cuts = list(lines.cuts_of(line))
        yield from cuts
        better = lines.better(line, idle)
        if better != line:
            cuts = list(lines.cuts_of(better))
            yield from cuts
        yield from self._two_on_each(better, micro_batches)

    def _two_on_each(self, line: Line, micro_batches: MicroBatches) -> Iterator[Pipeline]:
        """Two stages on each rank: in a loop, and down the ranks and back again."""
        placements: tuple[Placement, ...] = ("loop", "v") if len(self.points) > 2 * len(line) else ()
        for placement in placements:
            yield self._folded(line, micro_batches, stage_places(placement, len(line), 2))

    def even(self, line: Sequence[str], micro_batches: MicroBatches) -> Pipeline:
        """As many blocks for each device, whatever they cost; of more devices than there are blocks the first ones."""
        positions = points_of(self.model.graph, tied_together=self.tied_together).positions
        ranks = min(len(line), len(positions) - 1)
        at = [round(n * (len(positions) - 1) / ranks) for n in range(ranks + 1)]
        return made_of(micro_batches, line[:ranks], [positions[place] for place in at])

    def longest_s(self, pipeline: Pipeline) -> float:
        """Seconds of all micro-batches on the bottleneck rank."""
        work: dict[str, float] = {}
        for stage in pipeline.stages:
            (device,) = stage.devices
            sums = self.mean_s(device, ("F", "B"), pipeline.micro_batches)
            start, stop = (bisect_left(self.points.positions, op) for op in stage.ops)
            work[device] = work.get(device, 0.0) + float(sums[stop] - sums[start])
        return len(pipeline.micro_batches) * max(work.values())

    def mean_s(self, device: str, kinds: Sequence[Pass], micro_batches: MicroBatches) -> Floats:
        """Seconds of the mean micro-batch from the beginning of the model to each point."""
        sizes = Counter(micro_batches.sizes)
        found = np.zeros(len(self.points))
        for size, kind in product(sizes, kinds):
            found += sizes[size] * self._sums(device, kind, size)
        return found / len(micro_batches)

    def held(self, device: str, in_flight: int, micro_batches: MicroBatches) -> Floats:
        """Bytes of weights with their state, and of activations in flight, from the beginning of the model to each point."""
        return self._state + in_flight * self._kept(device, max(micro_batches.sizes))

    @cached_property
    def _state(self) -> Floats:
        """Bytes of weights, gradients and optimizer state to each point, counted where a weight is first read."""
        graph = self.model.graph
        read = {name: place for place, op in reversed(list(enumerate(graph.ops))) for name in op.parameters}
        state = np.zeros(len(graph.ops) + 1)
        for parameter in graph.parameters:
            if parameter.name in read:
                copies = 2 + self.model.recipe.states if parameter.trainable else 1
                state[read[parameter.name] + 1] += copies * parameter.bytes
        found: Floats = np.cumsum(state)[list(self.points.positions)]
        return found

    def _kept(self, device: str, size: int) -> Floats:
        """Bytes of the activations of a micro-batch to each point."""
        key = (self.like[device], size)
        if key not in self._activations:
            memory = self.model.device_memory[key[0]]
            own = [float(memory.activations(size, (0, at))) if at else 0.0 for at in self.points.positions]
            self._activations[key] = np.array(own)
        return self._activations[key]

    def _folded(self, line: Sequence[str], micro_batches: MicroBatches, place_of: Sequence[int]) -> Pipeline:
        """One half of the model after the other: what a rank has of the first counts in the second. Memory is left to the order."""
        ranks, last = len(line), len(self.points) - 1
        mean = [self.mean_s(device, ("F", "B"), micro_batches) for device in line]
        free = np.zeros(len(self.points))
        middle = int(np.argmin(np.abs(mean[0] - mean[0][-1] / 2)))
        turn = min(max(middle, ranks), last - ranks)
        first = _least([(own, 0.0, free, np.inf) for own in mean], (0, turn))
        assert first is not None  # there are points enough, and memory is no limit
        done = [float(own[b] - own[a]) for own, (a, b) in zip(mean, pairwise(first), strict=True)]
        second = _least([(mean[place], done[place], free, np.inf) for place in place_of[ranks:]], (turn, last))
        assert second is not None
        borders = [self.points.positions[n] for n in (*first, *second[1:])]
        return made_of(micro_batches, [line[place] for place in place_of], borders)

    def _sums(self, device: str, kind: Pass, size: int) -> Floats:
        """Seconds of a micro-batch from the beginning of the model to each point."""
        key = (self.like[device], kind, size)
        if key not in self._seconds:
            compute = self.model.compute[key[0]]
            own = [compute.seconds(kind, (0, at), size) if size else 0.0 for at in self.points.positions]
            self._seconds[key] = np.array(own)
        return self._seconds[key]

    @cached_property
    def like(self) -> dict[str, str]:
        """For each device the first that is as good."""
        return first_of(interchangeable(self.model))


@dataclass(frozen=True, kw_only=True)
class _Lines:
    """Orders of devices along a pipeline with one stage on each rank.

    ``beside``: for each device bytes of its peak beside what `held` counts, as the cost model had it in the last cut with the device.
    """

    cuts: FinerCuts
    micro_batches: MicroBatches
    beside: dict[str, float] = field(default_factory=dict)

    def cuts_of(self, line: Line) -> Iterator[Pipeline]:
        """The shortest cut, and where it does not fit, the shortest that fits under 1F1B, or else with one micro-batch at a time."""
        positions = self.cuts.points.positions
        for most in (len(self.micro_batches), 1):
            for _ in range(_ROUNDS):
                at = self._cut(line, most)[1]
                if not at:
                    break
                cut = made_of(self.micro_batches, line, [positions[n] for n in at])
                lacks = self._lacks(cut, most, at)
                if most > 1 or not lacks:
                    yield cut
                if not lacks:
                    return

    def better(self, line: Line, idle: Sequence[str]) -> Line:
        """The line with idle devices, and with two ranks exchanged, where that is estimated to be clearly shorter."""
        for device in idle:
            line = self._best([line, *self._with(line, device)])
        return self._best([line, *self._exchanged(line)])

    def _best(self, lines: Sequence[Line]) -> Line:
        """The first one, or the shortest if that is clearly shorter."""
        seconds = [self._cut(line, len(self.micro_batches))[0] for line in lines]
        least = min(seconds)
        return lines[0] if least > seconds[0] * _BELIEVED else lines[seconds.index(least)]

    def _with(self, line: Line, device: str) -> Iterator[Line]:
        """The line with another device, beside one that is as good where there is any."""
        if len(line) + 1 < len(self.cuts.points):
            like = self.cuts.like
            beside = [at for at, other in enumerate(line) if like[other] == like[device]]
            yield from ((*line[:at], device, *line[at:]) for at in beside[:1] or range(len(line) + 1))

    def _exchanged(self, line: Line) -> Iterator[Line]:
        for a, b in combinations(range(len(line)), 2):
            if self.cuts.like[line[a]] != self.cuts.like[line[b]]:
                other = list(line)
                other[a], other[b] = line[b], line[a]
                yield tuple(other)

    def _cut(self, line: Line, most: int) -> tuple[float, list[int]]:
        """Estimated seconds of the pipeline and its points; infinite where none fits with so many micro-batches in flight at most."""
        cuts, count = self.cuts, len(self.micro_batches)
        size = max(self.micro_batches.sizes)
        crossing = float(np.median([own(size) for own in cuts.points.crossing[1:-1] or (Size(),)]))
        sends = [cuts.model.collectives.send(a, b)(crossing) for a, b in pairwise(line)]
        stages = []
        for device, in_flight in zip(line, self._in_flight(line, most), strict=True):
            room = cuts.model.cluster.device(device).memory_bytes - self.beside.get(device, -inf)
            held = cuts.held(device, in_flight, self.micro_batches)
            stages.append((cuts.mean_s(device, ("F", "B"), self.micro_batches), 0.0, held, room))
        span = (0, len(cuts.points) - 1)
        found = [at for at in (_least(stages, span, count, sends), _least(stages, span)) if at]
        return min(((self._estimate_s(line, at) + 2 * sum(sends), at) for at in found), default=(inf, []))

    def _estimate_s(self, line: Line, at: Sequence[int]) -> float:
        """Seconds of the bottleneck rank, and what of a micro-batch on the others it waits for: the weights' half of a backward waits
        for the end."""
        own = [
            [float(sums[b] - sums[a]) for kinds in _PARTS for sums in [self.cuts.mean_s(d, kinds, self.micro_batches)]]
            for d, (a, b) in zip(line, pairwise(at), strict=True)
        ]
        longest = max(range(len(own)), key=lambda rank: own[rank][0])
        waits_s = sum(first for rank, (_, first) in enumerate(own) if rank != longest)
        return len(self.micro_batches) * own[longest][0] + waits_s

    def _in_flight(self, line: Line, most: int) -> list[int]:
        return [min(most, len(self.micro_batches), len(line) - rank) for rank in range(len(line))]

    def _lacks(self, cut: Pipeline, most: int, at: Sequence[int]) -> bool:
        """Whether a device lacks memory for a cut, by the cost model."""
        model, lacks = self.cuts.model, False
        line = [stage.devices[0] for stage in cut.stages]
        in_flight = self._in_flight(tuple(line), most)
        costs = model.of(plan_of(model, self.micro_batches.samples, (cut,)))
        for rank, (device, (a, b)) in enumerate(zip(line, pairwise(at), strict=True)):
            own = costs.ranks[model.cluster.rank(device)]
            assert own is not None  # it is in the pipeline
            peak = peak_of_all_kept(own, in_flight)
            held = self.cuts.held(device, in_flight[rank], self.micro_batches)
            self.beside[device] = peak - float(held[b] - held[a])
            lacks |= peak > model.cluster.device(device).memory_bytes
        return lacks


def _least(
    stages: Sequence[tuple[Floats, float, Floats, float]],
    span: tuple[int, int],
    count: int | None = None,
    sends: Sequence[float] = (),
) -> list[int] | None:
    """`least_cut` between two points.

    ``stages``: of each the seconds of a micro-batch to each point, those that its rank spends elsewhere, bytes to each point, and the
    most bytes that it may have.
    """
    start, stop = span
    first = stop - start - len(stages) + 1
    costs = []
    for number, (seconds, elsewhere_s, held, room) in enumerate(stages):
        begins, ends = (slice(start + number + n, start + number + n + first) for n in (0, 1))
        own = seconds[ends][None, :] - seconds[begins][:, None] + elsewhere_s
        fits = held[ends][None, :] - held[begins][:, None] <= room
        costs.append(np.where(fits & ~np.tri(first, k=-1, dtype=bool), own, np.inf))
    at = least_cut(costs, count, sends)
    return None if at is None else [start + point for point in at]


def made_of(micro_batches: MicroBatches, devices: Sequence[str], borders: Sequence[int]) -> Pipeline:
    """A pipeline of whole stages, which begin and end at the borders, that keep everything and have no order of their own."""
    stages = [stage_of(ops, (device,)) for ops, device in zip(pairwise(borders), devices, strict=True)]
    return Pipeline(micro_batches=micro_batches, stages=tuple(stages))
