"""A pipeline in outline: which rank runs which part of the model, from tables, before any order is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Literal, TypeAlias

import numpy as np

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.schedules.schedule import stage_places
from heterodyne.search.cuts import Cut, best_cut
from heterodyne.search.points import Points
from heterodyne.search.tables import Floats, PlaceTable, Tables

__all__ = ["FILLED", "Draft", "Drafting", "Line"]

Line: TypeAlias = tuple[str, ...]
"""Devices, the first stage's first."""

FILLED = 0.7  # of what the other stages take for one micro-batch: the weights' half of a backward can wait for the end
_TURNS = 2  # on both sides of the middle: where the second stages may begin


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Args:
    line: the devices, by pipeline rank.
    place_of: the pipeline rank of each stage. ``borders``: op positions at which stages begin, and the end.
    estimate_s: estimated seconds of a step; ``longest_s``: those of the bottleneck rank, a lower bound for any order.
    """

    line: Line
    micro_batches: MicroBatches
    place_of: tuple[int, ...]
    borders: tuple[int, ...]
    points: tuple[int, ...]
    estimate_s: float
    longest_s: float


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """Draws drafts over one set of points."""

    model: CostModel
    tables: Tables
    _sent: dict[tuple[int, ...], Floats] = field(default_factory=dict, repr=False)

    @property
    def points(self) -> Points:
        return self.tables.points

    def draft(self, line: Line, micro_batches: MicroBatches, *, exact: bool = False) -> Draft:
        """One stage per rank. ``exact``: of cuts with about the same bottleneck, the one with the shortest fill.

        Each rank has memory for the in-flight micro-batches of 1F1B, or where no cut has, for one at a time.
        Raises InfeasibleError with what each lacks.
        """
        count, places = len(micro_batches), len(line)
        borders = [self._border(a, b, micro_batches) for a, b in pairwise(line)]
        fill = FILLED / max(1, count)
        for most in (count, 1):
            tables = [self._table(d, micro_batches, min(most, count, places - r)) for r, d in enumerate(line)]
            step, lack = [t.step_s for t in tables], [t.lack_bytes for t in tables]
            try:
                cut = best_cut(step, lack, borders, line, fill=fill if exact else 0.0)
                break
            except InfeasibleError:
                if most == 1 or places >= len(self.points):
                    raise
        return self._draft(line, micro_batches, cut.points, cut.longest_s, cut.total_s)

    def roomiest(self, line: Line, micro_batches: MicroBatches) -> tuple[float, Draft]:
        """The cut that leaves most memory free on the place that has least of it, in an order that holds as little as can be, and the
        bytes that this place lacks (less than 0: has left). Raises InfeasibleError where the model has too few points.
        """
        tables = [self._table(device, micro_batches, 1) for device in line]
        over = [self.tables.least_over(device, max(micro_batches.sizes)) for device in line]
        lacks = [np.where(np.isfinite(t.step_s), own, np.inf) for t, own in zip(tables, over, strict=True)]
        least = min(float(lack.min()) for lack in lacks)
        nothing = np.zeros_like(lacks[0])
        cut = best_cut([lack - least for lack in lacks], [nothing] * len(line), [nothing[0]] * (len(line) - 1), line)
        works = [float(t.step_s[a, b]) for t, (a, b) in zip(tables, pairwise(cut.points), strict=True)]
        return cut.longest_s + least, self._draft(line, micro_batches, cut.points, max(works), sum(works))

    def folded(self, line: Line, micro_batches: MicroBatches, placement: Literal["loop", "v"]) -> Draft | None:
        """Two virtual stages per rank; None where the model has too few cut points. Memory is left to the order."""
        places, count = len(line), len(self.points)
        if count - 1 < 2 * places:
            return None
        step = [self._table(device, micro_batches, 1).step_s for device in line]
        back = list(range(places)) if placement == "loop" else list(reversed(range(places)))
        whole = step[0][0]
        middle = int(np.argmin(np.abs(whole - whole[-1] / 2)))
        turns = range(max(places, middle - _TURNS), min(count - 1 - places, middle + _TURNS) + 1)
        points = min((self._turned(step, back, turn) for turn in turns), default=(inf, ()))[1]
        if not points:
            return None
        place_of = stage_places(placement, places, 2)
        work = [0.0] * places
        for stage, place in enumerate(place_of):
            work[place] += float(step[place][points[stage], points[stage + 1]])
        made = self._draft(line, micro_batches, points, max(work), max(work) + (sum(work) - max(work)) / 2)
        return replace(made, place_of=place_of)

    def even(self, line: Line, micro_batches: MicroBatches) -> Draft:
        """As many parts between the points for each place, whatever they cost; nothing is estimated."""
        points = tuple(round(stage * (len(self.points) - 1) / len(line)) for stage in range(len(line) + 1))
        return self._draft(line, micro_batches, points, inf, inf)

    def _draft(
        self, line: Line, micro_batches: MicroBatches, points: tuple[int, ...], longest_s: float, total_s: float
    ) -> Draft:
        """One stage a rank. A step takes as long as its slowest stage, and a part of what the others take while they fill and drain."""
        fill = FILLED / max(1, len(micro_batches))
        return Draft(
            line=line,
            micro_batches=micro_batches,
            place_of=tuple(range(len(line))),
            borders=tuple(self.points.positions[at] for at in points),
            points=points,
            estimate_s=longest_s + (fill * (total_s - longest_s) if longest_s < inf else 0.0),
            longest_s=longest_s,
        )

    def _turned(self, step: Sequence[Floats], back: Sequence[int], turn: int) -> tuple[float, tuple[int, ...]]:
        """The longest work of a place, and the points, if the second stages begin at point ``turn``."""

        def halved(tables: Sequence[Floats], part: slice) -> Cut:
            own = [table[part, part] for table in tables]
            room = [np.zeros_like(own[0])] * len(own)
            return best_cut(own, room, [room[0][0]] * (len(own) - 1), [""] * len(own))

        first = halved(step, slice(turn + 1))
        done = [s[a, b] for s, a, b in zip(step, first.points, first.points[1:], strict=False)]
        # What a place has to do already counts, so that the second half makes up for what the first could not balance.
        second = halved([step[place] + done[place] for place in back], slice(turn, None))
        return max(second.longest_s, *done), (*first.points, *(turn + at for at in second.points[1:]))

    def fits(self, draft: Draft, stage: int, points: Sequence[int]) -> bool:
        """Whether a stage would have room on its place between these points, with as many micro-batches in flight as 1F1B has."""
        place = draft.place_of[stage]
        in_flight = (
            min(len(draft.micro_batches), len(draft.line) - place) if len(draft.place_of) == len(draft.line) else 1
        )
        table = self._table(draft.line[place], draft.micro_batches, in_flight)
        return bool(table.lack_bytes[points[stage], points[stage + 1]] <= 0)

    def _table(self, device: str, micro_batches: MicroBatches, in_flight: int) -> PlaceTable:
        return self.tables.table(device, Counter(micro_batches.sizes), in_flight)

    def _border(self, before: str, behind: str, micro_batches: MicroBatches) -> Floats:
        """Seconds in which the link between two devices is occupied in a step, by point."""
        send = self.model.collectives.send
        s_per_byte = max(send(before, behind).s_per_byte, send(behind, before).s_per_byte)
        if micro_batches.sizes not in self._sent:
            sizes = Counter(micro_batches.sizes)
            each = [[crossing(size) * number for crossing in self.points.crossing] for size, number in sizes.items()]
            self._sent[micro_batches.sizes] = np.sum(np.array(each, dtype=np.float64), axis=0)
        return self._sent[micro_batches.sizes] * s_per_byte
