"""Memory of pipelines, and the number of micro-batches that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from operator import mul
from typing import NamedTuple

from heterodyne.cluster.fleet import Fleet
from heterodyne.plan.schedules.held_counts import alike, held_at_most
from heterodyne.predictor.software import Software
from heterodyne.recent import Recent
from heterodyne.search.fleet.plan import ScheduleName, Template
from heterodyne.search.fleet.stage_tables import StageTables
from heterodyne.search.fleet.tables import Memory

__all__ = ["PipelineMemory"]

_FEW_PLACES = 6  # of a pipeline, for which every number of micro-batches is tried


class _Place(NamedTuple):
    """Bytes of a pipeline rank: ``always``: constant, by part and in all; ``each``: of one micro-batch of each of its stages."""

    always: Memory
    always_bytes: float
    each: tuple[float, ...]

    @classmethod
    def of(cls, stages: Sequence[Memory]) -> _Place:
        """The sum over its stages, except for workspace, which is the largest. ``stages``: each with one micro-batch."""
        always = Memory(
            parameters=sum(stage.parameters for stage in stages),
            gradients=sum(stage.gradients for stage in stages),
            optimizer=sum(stage.optimizer for stage in stages),
            activations=0.0,
            passing=max(stage.passing for stage in stages),
        )
        return cls(always, always.total, tuple(stage.activations for stage in stages))

    def holding(self, held: Sequence[Sequence[int]]) -> Memory:
        """``held``: micro-batches in flight per stage, at every moment that may be the peak."""
        return self.always._replace(activations=self._activations(held))

    def total(self, held: Sequence[Sequence[int]]) -> float:
        """Of `holding`. A search asks for little else."""
        return self.always_bytes + self._activations(held)

    def _activations(self, held: Sequence[Sequence[int]]) -> float:
        if len(self.each) == 1:
            return held[0][0] * self.each[0]
        return max(float(sum(map(mul, vector, self.each))) for vector in held)


@dataclass(frozen=True, kw_only=True)
class PipelineMemory:
    """Memory of pipelines on one fleet, for one global batch."""

    fleet: Fleet
    global_batch: int
    tables: StageTables
    software: Software = field(default_factory=Software)
    _places: Recent[tuple[Template, int, int], tuple[_Place, ...]] = field(
        default_factory=lambda: Recent(1024), repr=False
    )
    _fits: dict[tuple[Template, ScheduleName, int, int, int], bool] = field(default_factory=dict, repr=False)
    _most: dict[tuple[Template, ScheduleName, int, int], int] = field(default_factory=dict, repr=False)

    def whole(self, template: Template) -> int:
        """Micro-batches of a pipeline that does the whole batch."""
        return ceil(self.global_batch / template.micro_batch)

    def memory(
        self, template: Template, *, micro_batches: int, schedule: ScheduleName, replicas: int, zero: int
    ) -> list[Memory]:
        """Memory of each pipeline rank, where ``replicas`` pipelines shard state: the sum over its stages, except for workspace.

        Activations in flight follow the schedule: under 1F1B rank i of p holds min(m, p - i) micro-batches, under GPipe all m.
        """
        held = held_at_most(schedule, template.places, template.chunks, micro_batches)
        places = self._of_one(template, replicas, zero)
        return [place.holding(vectors) for place, vectors in zip(places, held, strict=True)]

    def fits(self, template: Template, micro_batches: int, schedule: ScheduleName, replicas: int, zero: int) -> bool:
        """Whether so many micro-batches fit."""
        few = alike(schedule, template.places, template.chunks, micro_batches)
        key = (template, schedule, few, replicas, zero)
        if key not in self._fits:
            held = held_at_most(schedule, template.places, template.chunks, few)
            places = self._of_one(template, replicas, zero)
            self._fits[key] = all(
                place.total(vectors) <= self.fleet.pool(home.pool).memory_bytes
                for place, vectors, home in zip(places, held, template.homes, strict=True)
            )
        return self._fits[key]

    def most_micro_batches(self, template: Template, schedule: ScheduleName, replicas: int, zero: int) -> int:
        """The largest number of micro-batches that fits; 0 if not even one. With virtual stages fewer may need more (see `fits`)."""
        key = (template, schedule, replicas, zero)
        if key not in self._most:
            if template.chunks > 1:
                fits = partial(self.fits, template, schedule=schedule, replicas=replicas, zero=zero)
                self._most[key] = self._of_several(template, fits)
            else:
                self._most[key] = self._of_single(template, schedule, self._of_one(template, replicas, zero))
        return self._most[key]

    def _of_one(self, template: Template, replicas: int, zero: int) -> tuple[_Place, ...]:
        def made() -> tuple[_Place, ...]:
            stages = list(self._stages(template, replicas, zero))
            return tuple(_Place.of(stages[place :: template.places]) for place in range(template.places))

        return self._places.get((template, replicas, zero), made)

    def _stages(self, template: Template, replicas: int, zero: int) -> Iterator[Memory]:
        """Of each stage with one micro-batch."""
        # Where one collective serves all layers, what it gathers or scatters is whole until the last of them.
        level = zero - 1 if self.software.combined and zero > 1 else zero
        for stage, table in zip(template.stages, self.tables.of(template), strict=True):
            own = table.memory(
                stage.start, stage.stop, recompute=stage.recompute, held=1, replicas=replicas, zero=level
            )
            if self.software.keeps_outputs and stage.stop < len(table.costs):
                # As the next layer would have it on such a device.
                output = table.costs[stage.stop].kept_bytes_recomputed
                own = own._replace(activations=own.activations + output)
            yield own

    def _of_several(self, template: Template, fits: Callable[[int], bool]) -> int:
        """Stages on each place: rounds are larger by a part of the micro-batches that do not fill them, so of a few that follow each other
        one needs least; no number needs less than one does.
        """
        if not fits(1):
            return 0
        whole, places = self.whole(template), template.places
        few = min(whole, 4 * places)
        options: list[int]
        if places <= _FEW_PLACES:
            options = [*range(whole, max(few, whole - places), -1), *range(few, 0, -1)]
        else:
            options = [whole, whole // places * places, *range(few // places * places, 0, -places), 1]
        return next(count for count in options if count and fits(count))

    def _of_single(self, template: Template, schedule: ScheduleName, places: Sequence[_Place]) -> int:
        """One stage on each place, so that more need no less: as many as the place holds at the same time that has room for fewest."""
        most = self.whole(template)
        held = held_at_most(schedule, template.places, 1, most)
        for place, ((own,),), home in zip(places, held, template.homes, strict=True):
            memory_bytes = self.fleet.pool(home.pool).memory_bytes
            if place.total(((own,),)) > memory_bytes:
                (each,) = place.each
                most = min(most, int((memory_bytes - place.always_bytes) / each) if each else 0)
        return max(0, most)
