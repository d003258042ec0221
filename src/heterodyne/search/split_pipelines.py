"""Pipelines whose stages may lie in parts: the model is cut over groups of devices, and the weights of a stage over those of its group.

Groups are devices between which exchanges are likely to pay: of one node, alike ones, the slowest two. A group counts as one device:
its seconds are those that its members take together (`heterodyne.cost.in_parts`), its memory is that of the member that has least
for its share. The cut is Whale's balance between TaskGraphs on these (`search.cuts`); the best few are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline
from heterodyne.search.by_speed import shares_by
from heterodyne.search.cuts import best_cut
from heterodyne.search.drafts import FILLED, Drafting
from heterodyne.search.lines import Line, Place, wide_lines
from heterodyne.search.pipelines import Pipelines
from heterodyne.search.planned import Candidate
from heterodyne.search.points import sliceable
from heterodyne.search.predict import stage_of
from heterodyne.search.split import Split
from heterodyne.search.tables import Floats, PlaceTable

__all__ = ["SplitPipelines"]

_MOST_PLAYED = 3
_MOST_DEVICES = 16  # each group that is unlike another one takes a search for its layouts


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A line and its cut. ``estimate_s``: of a step."""

    line: Line
    micro_batches: MicroBatches
    borders: tuple[int, ...]
    estimate_s: float


@dataclass(frozen=True, kw_only=True)
class SplitPipelines:
    """``split``: of whole models; ``pipelines``: of single devices."""

    split: Split
    pipelines: Pipelines
    _together: dict[tuple[object, ...], Floats] = field(default_factory=dict, repr=False)

    def candidates(self) -> tuple[Candidate, ...]:
        """The fastest that is found; none where ops mix samples, or where what crosses does not follow the batch."""
        graph, devices = self._model.graph, self._model.cluster.devices
        if self.split.count is not None or not sliceable(graph) or not 2 < len(devices) <= _MOST_DEVICES:
            return ()
        drawn = sorted(self._drawn(), key=lambda draft: draft.estimate_s)[:_MOST_PLAYED]
        found = [self._weighed(draft) for draft in drawn]
        possible = [candidate for candidate in found if candidate.step_s is not None]
        return (min(possible, key=lambda c: c.weighed_s),) if possible else tuple(found[:1])

    @property
    def _model(self) -> CostModel:
        return self.split.model

    @property
    def _drafting(self) -> Drafting:
        return self.pipelines.drafting

    def _drawn(self) -> Iterator[_Drawn]:
        for size in self.split.tried:
            micro_batches = self.split.micro_batches(self.split.samples, size)
            for line in self._lines():
                try:
                    yield self._draft(line, micro_batches)
                except (InfeasibleError, PlanError):
                    continue

    def _lines(self) -> Iterable[Line]:
        """Groups in a line, larger memory first, and the other way round."""
        kinds, rate = self.pipelines.kinds, self.pipelines.rate
        memory = {device.id: device.memory_bytes for device in self._model.cluster.devices}
        nodes: dict[str, list[str]] = {}
        for device in self._model.cluster.devices:
            nodes.setdefault(device.node, []).append(device.id)
        alone = tuple(Place(devices=(device,)) for device in sorted(memory, key=lambda d: (-memory[d], -rate[d])))
        grouped = [tuple(place.devices for place in line) for line in wide_lines(alone, kinds, rate, _MOST_DEVICES)]
        grouped += [tuple(map(tuple, nodes.values()))] if 1 < len(nodes) < len(memory) else []
        found: dict[tuple[object, ...], Line] = {}
        for groups in grouped:
            by_memory = sorted(groups, key=lambda group: -sum(memory[device] for device in group))
            for order in (by_memory, by_memory[::-1]):
                line = tuple(Place(devices=group, shares=shares_by([rate[d] for d in group])) for group in order)
                found.setdefault(tuple(tuple(kinds[d] for d in place.devices) for place in line), line)
        return found.values()

    def _draft(self, line: Line, micro_batches: MicroBatches) -> _Drawn:
        """Raises InfeasibleError if no cut fits, PlanError if a group cannot have the model in parts."""
        points, count = self._drafting.points, len(micro_batches)
        tables = [self._table(place, micro_batches, min(count, len(line) - at)) for at, place in enumerate(line)]
        nothing = [np.zeros(len(points))] * (len(line) - 1)
        names = [" + ".join(place.devices) for place in line]
        fill = FILLED / max(1, count)
        cut = best_cut([t.step_s for t in tables], [t.lack_bytes for t in tables], nothing, names, fill=fill)
        return _Drawn(
            line=line,
            micro_batches=micro_batches,
            borders=tuple(points.positions[at] for at in cut.points),
            estimate_s=cut.estimate_s(fill),
        )

    def _table(self, place: Place, micro_batches: MicroBatches, in_flight: int) -> PlaceTable:
        sizes = {size: micro_batches.sizes.count(size) for size in micro_batches.sizes}
        tables = self._drafting.tables
        if len(place.devices) == 1:
            return tables.table(place.devices[0], sizes, in_flight)
        step = np.zeros((len(self._drafting.points),) * 2)
        for size, count in sizes.items():
            passes = self._passes_s(place, size)
            step += count * (passes[None, :] - passes[:, None])
        total = sum(place.shares)
        lack, update = np.zeros_like(step), np.zeros_like(step)
        for device, share in zip(place.devices, place.shares, strict=True):
            memory = self._model.cluster.device(device).memory_bytes
            # Samples that are on their way through the pipeline are cut as the weights are.
            needs = tables.needs(device, max(sizes), in_flight) * share / total
            lack = np.maximum(lack, needs - memory)
            update = np.maximum(update, tables.update_s(device) * share / total)
        return PlaceTable(step_s=step + update, lack_bytes=lack)

    def _passes_s(self, place: Place, size: int) -> Floats:
        """Seconds of forward and backward of a micro-batch from the beginning of the model to each point, by all members together."""
        key = (tuple(self.pipelines.kinds[device] for device in place.devices), place.shares, size)
        if key not in self._together:
            whole = self.split.stage((0, len(self._model.graph.ops)), place.devices, "split", place.shares)
            pipeline = Pipeline(micro_batches=MicroBatches((size,)), stages=(whole,))
            stage = self._model.in_parts(pipeline, 0)
            assert stage is not None
            self._together[key] = self._drafting.tables.sums(
                lambda ops: stage.together_s("F", size, ops)[0] + stage.together_s("B", size, ops)[0]
            )
        return self._together[key]

    def _weighed(self, drawn: _Drawn) -> Candidate:
        stages = tuple(
            self.split.stage(ops, place.devices, "split", place.shares)
            if len(place.devices) > 1
            else stage_of(ops, place.devices)
            for place, ops in zip(drawn.line, pairwise(drawn.borders), strict=True)
        )
        groups = _said(place.devices for place in drawn.line)
        name = f"a pipeline of {len(stages)} stages, weights split inside: {groups}, {drawn.micro_batches}"
        return self.split.weighed(name, "split", (Pipeline(micro_batches=drawn.micro_batches, stages=stages),))


def _said(groups: Iterable[Sequence[str]]) -> str:
    return " | ".join(" + ".join(group) for group in groups)
