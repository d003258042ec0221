"""Neighbourhood of a mix for local search: each neighbour is judged by its played step time.

The cut with the fastest bottleneck need not be the best for few micro-batches, and integer counts leave devices over. So a neighbour
moves a layer over a stage boundary, changes a micro-batch size, the parallel widths of a stage, its recompute, the order of the pools, the
stages for the devices of one or the number of virtual stages, cuts pipelines over unlike pools alike, or exchanges pipelines for others.
Neighbours whose lower bound is no better than the best are not played.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations_with_replacement, groupby, pairwise, permutations, product
from math import ceil

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.arrays import Ints
from heterodyne.search.fleet.counts import Limits
from heterodyne.search.fleet.cutter import Cutter, Places
from heterodyne.search.fleet.kinds import StageKinds
from heterodyne.search.fleet.plan import (
    INTERLEAVED,
    Mix,
    ScheduleName,
    Template,
    TemplateStage,
    chunked,
    mix_of,
)
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space

__all__ = ["Neighbourhood", "Shared"]

Shared = tuple[int, int]
"""Pipelines that share state, and its level."""
_Cuts = tuple[tuple[int, int], ...]
_FEW = 8  # stages up to which a border moves together with the size of the micro-batches
_CUT = 16  # stages up to which a pipeline is cut anew


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """The moves from a mix.

    Args:
        columns: templates that may be added.
        schedule: for which stages that do not fit are recomputed.
        max_chunks: virtual stages per rank.
    """

    kinds: StageKinds
    cutter: Cutter
    columns: Sequence[Template]
    limits: Limits
    schedule: ScheduleName = "1F1B"
    max_chunks: int = 1

    @property
    def _predictor(self) -> Predictor:
        return self.kinds.predictor

    @property
    def _space(self) -> Space:
        return self.kinds.space

    @cached_property
    def _devices(self) -> Ints:
        """Of each column (see `Limits.devices`)."""
        return self.limits.devices(self.columns)

    def from_mix(self, mix: Mix, zero: int) -> Iterator[Mix]:
        """Every mix one move away, the smallest changes first. ``zero``: the ZeRO level at which ``mix`` is best."""
        shared = (sum(count for _, count in mix), zero)
        for template, count in mix:
            for changed in self.changed(template, shared):
                yield mix_of((changed if t == template else t, n) for t, n in mix)
                if count > 1:
                    yield mix_of([*_less(mix, template), (changed, 1)])
        yield from self._filled(mix)
        yield from self._aligned(mix, shared)
        yield from self._without_one(mix)
        yield from self._without_two(mix)
        for (a, _), (b, _) in permutations(mix, 2):
            for made in self._exchanged(a, b, shared):
                yield mix_of([*_less(_less(mix, a), b), *((template, 1) for template in made)])

    def _without_one(self, mix: Mix) -> Iterator[Mix]:
        """Without one pipeline of a template, or all of them, and others in their place."""
        for template, _ in mix:
            fewer = _less(mix, template)
            if fewer:
                yield mix_of(fewer)
            yield from self._filled(fewer)
            without = mix_of((t, n) for t, n in mix if t != template)
            if without != fewer:
                yield from self._filled(without)

    def _without_two(self, mix: Mix) -> Iterator[Mix]:
        """Another pipeline in the place of two."""
        for a, b in combinations_with_replacement([template for template, _ in mix], 2):
            fewer = _less(_less(mix, a), b)
            if sum(n for _, n in fewer) == sum(n for _, n in mix) - 2:
                yield from self._filled(fewer)

    def interleaved(self, mix: Mix, zero: int) -> Iterator[Mix]:
        """The mix with more virtual stages per rank, where there are layers for that."""
        shared = (sum(count for _, count in mix), zero)
        for chunks in range(2, self.max_chunks + 1):
            options = [
                [own for own in chunked(template, chunks) if len(own.stages) <= self._space.max_stages]
                for template, _ in mix
            ]
            for which in range(max(map(len, options))):
                made = [
                    (own[min(which, len(own) - 1)] if own else template, count)
                    for own, (template, count) in zip(options, mix, strict=True)
                ]
                yield mix_of(made)
                again = [(self._fitted(t, shared) if t.chunks > 1 else t, count) for t, count in made]
                if again != made:
                    yield mix_of(again)

    def changed(self, template: Template, shared: Shared) -> Iterator[Template]:
        """Templates one move away: a boundary moved, other virtual stages, another order of the pools or number of stages, other widths,
        another micro-batch size, other recompute.
        """
        yield from self._cut_anew(template, shared)
        yield from self._moved(template, shared)
        yield from self._chunked(template, shared)
        if template.chunks > 1:
            yield from self._within_places(template)
        yield from self._rewidened(template, shared)
        yield from self._resized(template, shared)
        yield from self._recomputed(template)

    def _chunked(self, template: Template, shared: Shared) -> Iterator[Template]:
        for chunks in range(1, self.max_chunks + 1):
            if chunks != template.chunks and chunks * template.places <= self._space.max_stages:
                for other in chunked(template, chunks):
                    yield from dict.fromkeys((other, self._fitted(other, shared)))

    def _resized(self, template: Template, shared: Shared) -> Iterator[Template]:
        for size in self.kinds.sizes:
            if size != template.micro_batch:
                sized = self._fitted(replace(template, micro_batch=size), shared)
                # Where its widths do not divide the size, others may.
                for other in [sized] if self._known(sized) else self._rewidened(sized, shared):
                    yield other
                    if len(template.stages) <= _FEW:
                        yield from self._moved(other, shared)

    def _recomputed(self, template: Template) -> Iterator[Template]:
        for place, home in enumerate(template.homes):
            if home.recompute or self._space.recompute:
                yield _again(template, {place: not home.recompute})

    def _moved(self, template: Template, shared: Shared) -> Iterator[Template]:
        stages = template.stages
        for number, (a, b) in enumerate(pairwise(stages)):
            for border in (a.stop - 1, a.stop + 1):
                if a.start < border < b.stop:
                    moved = (*stages[:number], replace(a, stop=border), replace(b, start=border), *stages[number + 2 :])
                    yield replace(template, stages=moved)
                    if self._space.recompute:
                        yield self._fitted(replace(template, stages=moved), shared)

    def _exchanged(self, a: Template, b: Template, shared: Shared) -> Iterator[tuple[Template, Template]]:
        """Two pipelines after a stage of the first has gone to the second, or been exchanged for one of its."""
        if max(a.chunks, b.chunks) > 1 or len(a.stages) + len(b.stages) > _CUT:
            return
        own, others = list(map(_place, a.stages)), list(map(_place, b.stages))
        found: dict[tuple[Places, Places], None] = {}
        for i, j in product(range(len(own)), range(len(others) + 1)):
            left = own[:i] + own[i + 1 :]
            if left:
                found[_runs(left), _runs([*others[:j], own[i], *others[j:]])] = None
            if j < len(others) and own[i][0] != others[j][0]:
                swapped = [*own[:i], others[j], *own[i + 1 :]], [*others[:j], own[i], *others[j + 1 :]]
                found[_runs(swapped[0]), _runs(swapped[1])] = None
        for one, two in found:
            yield from product(
                self._cut_over(one, a.micro_batch, shared), list(self._cut_over(two, b.micro_batch, shared))
            )

    def _aligned(self, mix: Mix, shared: Shared) -> Iterator[Mix]:
        """All pipelines over one pool cut as one of them is, or would be with other stages: stage by stage they exchange less."""
        alone = [template for template, _ in mix if len(template.devices) == 1 and template.chunks == 1]
        others = [
            other
            for template in alone
            for count in (len(template.stages) // 2, 2 * len(template.stages))
            if 0 < count <= _CUT
            for other in self._cut_over(((*_place(template.stages[0]), count),), template.micro_batch, shared)
        ]
        for cuts in dict.fromkeys(_cuts(template) for template in (*alone, *others)):
            made = [self._cut_as(template, count, cuts, shared) for template, count in mix if template in alone]
            if None not in made:
                rest = (own for own in mix if own[0] not in alone)
                yield mix_of([*rest, *(own for own in made if own is not None)])

    def _cut_as(self, template: Template, count: int, cuts: _Cuts, shared: Shared) -> tuple[Template, int] | None:
        """As many pipelines with such stages as there are devices for, of the widths with which they do most; None if none fits."""
        ((pool, devices),) = template.devices.items()
        found = []
        for widths in self.kinds.widths(pool, template.micro_batch):
            stages = (TemplateStage(pool=pool, widths=widths, start=start, stop=stop) for start, stop in cuts)
            made = self._fitted(replace(template, stages=tuple(stages)), shared)
            most = count * devices // made.devices[pool]
            if most and self._known(made):
                found.append((self._predictor.pipeline_time.longest_s(made) / most, made, most))
        return min(found, key=lambda own: own[0])[1:] if found else None

    def _cut_anew(self, template: Template, shared: Shared) -> Iterator[Template]:
        """Pools in another order, and other numbers of stages over the same devices of one of them, with optimal cuts."""
        if template.chunks > 1 or len(template.stages) > _CUT:
            return
        runs = _runs(map(_place, template.stages))
        others: dict[Places, None] = {}
        for at in range(len(runs) - 1):
            others[*runs[:at], runs[at + 1], runs[at], *runs[at + 2 :]] = None
        others[tuple(reversed(runs))] = None
        for at, (pool, widths, count) in enumerate(runs):
            for other in self.kinds.widths(pool, template.micro_batch):
                if other.devices != widths.devices and count * widths.devices % other.devices == 0:
                    fold = pool, other, count * widths.devices // other.devices
                    others[*runs[:at], fold, *runs[at + 1 :]] = None
        others.pop(runs, None)
        for places in others:
            yield from self._cut_over(places, template.micro_batch, shared)

    def _cut_over(self, places: Places, size: int, shared: Shared) -> Iterator[Template]:
        """The optimal cuts over these stages; none where there are too many of them or of pools, or one cannot do the micro-batches."""
        pipelines, zero = shared
        pools = len({pool for pool, _, _ in places})
        if sum(count for _, _, count in places) > self._space.max_stages or pools > (self._space.max_pools or pools):
            return
        rounds = ceil(self._predictor.global_batch / (size * pipelines))
        if all(widths in self.kinds.widths(pool, size) for pool, widths, _ in places):
            yield from self.cutter.cut(places, size, rounds, pipelines, zero)

    def _within_places(self, template: Template) -> Iterator[Template]:
        """A layer more in one stage of a place and a layer less in its next one: every border between them moves."""
        stages, places = template.stages, template.places
        for first in range(len(stages) - places):
            for by in (-1, 1):
                starts = [s.start + by * (first < number <= first + places) for number, s in enumerate(stages)]
                stops = [*starts[1:], stages[-1].stop]
                if all(start < stop for start, stop in zip(starts, stops, strict=True)):
                    yield replace(
                        template,
                        stages=tuple(
                            replace(s, start=start, stop=stop)
                            for s, start, stop in zip(stages, starts, stops, strict=True)
                        ),
                    )

    def _rewidened(self, template: Template, shared: Shared) -> Iterator[Template]:
        """Other widths for the same devices, for runs of alike stages at once; with few stages for each by itself too."""
        homes = template.homes
        starts = [n for n, home in enumerate(homes) if not n or _place(home) != _place(homes[n - 1])]
        spans = list(pairwise((*starts, len(homes))))
        if len(homes) <= _FEW:
            spans += [(n, n + 1) for n in range(len(homes)) if (n, n + 1) not in spans]
        for first, last in spans:
            for widths in self.kinds.widths(homes[first].pool, template.micro_batch):
                if widths.devices == homes[first].devices and widths != homes[first].widths:
                    stages = tuple(
                        replace(stage, widths=widths) if first <= number % template.places < last else stage
                        for number, stage in enumerate(template.stages)
                    )
                    made = self._fitted(replace(template, stages=stages), shared)
                    if self._known(made):
                        yield made

    def _known(self, template: Template) -> bool:
        """Whether the costs of all its stages are known."""
        try:
            self._predictor.stage_tables.of(template)
        except KeyError:
            return False
        return True

    def _fitted(self, template: Template, shared: Shared) -> Template:
        """With recompute on just the ranks that do not fit without it."""
        if not self._space.recompute or not self._known(template):
            return template
        plain: ScheduleName = "1F1B" if template.chunks == 1 else "Interleaved1F1B"
        own = self.schedule if (self.schedule in INTERLEAVED) == (template.chunks > 1) else plain
        replicas, zero = shared
        bare = _again(template, dict.fromkeys(range(template.places), False))
        needs = self._predictor.pipeline_memory.memory(
            bare, micro_batches=self._predictor.global_batch, schedule=own, replicas=replicas, zero=zero
        )
        fleet = self._predictor.fleet
        return _again(
            bare, {n: need.total > fleet.pool(bare.homes[n].pool).memory_bytes for n, need in enumerate(needs)}
        )

    def _filled(self, mix: Mix) -> list[Mix]:
        """With one more replica of some column, or as many as there are devices for; what may be fastest first."""
        most = self.limits.left(mix).most_of(self._devices).tolist()
        found = [
            mix_of([*mix, (column, count)])
            for column, top in zip(self.columns, most, strict=True)
            for count in sorted({min(top, 1), top})
            if count > 0
        ]
        return sorted(found, key=self._predictor.bound_s)


def _place(stage: TemplateStage) -> tuple[str, Widths]:
    return stage.pool, stage.widths


def _again(template: Template, recompute: Mapping[int, bool]) -> Template:
    """With all stages of some places recomputed or not."""
    wanted = [recompute.get(number % template.places, stage.recompute) for number, stage in enumerate(template.stages)]
    if all(again == stage.recompute for again, stage in zip(wanted, template.stages, strict=True)):
        return template
    stages = tuple(
        stage if again == stage.recompute else replace(stage, recompute=again)
        for again, stage in zip(wanted, template.stages, strict=True)
    )
    return replace(template, stages=stages)


def _runs(places: Iterable[tuple[str, Widths]]) -> Places:
    return tuple((pool, widths, len(list(own))) for (pool, widths), own in groupby(places))


def _cuts(template: Template) -> _Cuts:
    return tuple((stage.start, stage.stop) for stage in template.stages)


def _less(mix: Mix, template: Template) -> Mix:
    """Without one pipeline of a template."""
    return mix_of((t, n - (t == template)) for t, n in mix)
