"""From a good mix of pipelines to a better one, step by step, each judged by the played time.

Cuts that are best for the slowest stage need not be best for few micro-batches, and whole counts leave devices over. So a
step moves a layer over a border, changes a size of micro-batch, the widths of a stage, what is recomputed, or takes pipelines away and
puts others in their place. Whatever cannot win even if its pipelines never waited is not played.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, pairwise

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.plan import Stage, Template
from heterodyne.search.fleet.predict import Mix, Predictor, Weighed, mix_of

__all__ = ["Steps", "climb"]

Shared = tuple[int, int]
"""Pipelines that share state, and its level."""
_FEW = 8  # stages up to which a border moves together with the size of the micro-batches


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What may be done to a mix. ``columns``: templates that may be put in; ``sizes``: of micro-batches, ascending; ``widths``: that a
    stage in a pool may have at a size of micro-batch; ``usd``: what a device of each pool costs, and what all may cost.
    """

    predictor: Predictor
    columns: Sequence[Template]
    sizes: Sequence[int]
    widths: Callable[[str, int], Sequence[Widths]]
    recompute: bool
    most_pipelines: int | None = None
    usd: tuple[Mapping[str, float], float] | None = None

    def from_mix(self, mix: Mix, zero: int) -> Iterator[Mix]:
        """Every mix that is one step away, those with the smallest changes first. ``zero``: the level at which it is best."""
        shared = (sum(count for _, count in mix), zero)
        for template, count in mix:
            for changed in self.changed(template, shared):
                yield mix_of((changed if t == template else t, n) for t, n in mix)
                if count > 1:
                    yield mix_of([*_less(mix, template), (changed, 1)])
        if len(mix) > 1:
            # The replica of a layer with the shortest backward says what of its gradients hides.
            for size in self.sizes:
                resized = [self._fitted(replace(template, micro_batch=size), shared) for template, _ in mix]
                if all(map(self._known, resized)):
                    yield mix_of(zip(resized, (count for _, count in mix), strict=True))
        for template, _ in mix:
            fewer = _less(mix, template)
            if fewer:
                yield mix_of(fewer)
            yield from self._filled(fewer)
            without = mix_of((t, n) for t, n in mix if t != template)
            if without != fewer:
                yield from self._filled(without)
        yield from self._filled(mix)
        for a, b in combinations_with_replacement([template for template, _ in mix], 2):
            fewer = _less(_less(mix, a), b)
            if sum(n for _, n in fewer) == sum(n for _, n in mix) - 2:
                yield from self._filled(fewer)

    def changed(self, template: Template, shared: Shared) -> Iterator[Template]:
        """A border moved, another size of micro-batch, other widths, or something recomputed or not."""
        yield from self._moved(template, shared)
        yield from self._rewidened(template, shared)
        for size in self.sizes:
            if size != template.micro_batch:
                sized = self._fitted(replace(template, micro_batch=size), shared)
                # Where its widths do not divide the size, others may.
                for other in self._known(sized) or self._rewidened(sized, shared):
                    yield other
                    if len(template.stages) <= _FEW:
                        yield from self._moved(other, shared)
        stages = template.stages
        for number, stage in enumerate(stages):
            if stage.recompute or self.recompute:
                toggled = replace(stage, recompute=not stage.recompute)
                yield replace(template, stages=(*stages[:number], toggled, *stages[number + 1 :]))

    def _moved(self, template: Template, shared: Shared) -> Iterator[Template]:
        stages = template.stages
        for number, (a, b) in enumerate(pairwise(stages)):
            for border in (a.stop - 1, a.stop + 1):
                if a.start < border < b.stop:
                    moved = (*stages[:number], replace(a, stop=border), replace(b, start=border), *stages[number + 2 :])
                    yield replace(template, stages=moved)
                    if self.recompute:
                        yield self._fitted(replace(template, stages=moved), shared)

    def _rewidened(self, template: Template, shared: Shared) -> Iterator[Template]:
        """Other widths of as many devices, for alike stages behind each other at once; of a few stages for each by itself too."""
        stages = template.stages
        starts = [n for n, s in enumerate(stages) if not n or _place(s) != _place(stages[n - 1])]
        spans = list(pairwise((*starts, len(stages))))
        if len(stages) <= _FEW:
            spans += [(n, n + 1) for n in range(len(stages)) if (n, n + 1) not in spans]
        for first, last in spans:
            for widths in self.widths(stages[first].pool, template.micro_batch):
                if widths.devices == stages[first].devices and widths != stages[first].widths:
                    tensor, context, data = widths
                    own = [replace(s, width=tensor, context=context, data=data) for s in stages[first:last]]
                    yield from self._known(
                        self._fitted(replace(template, stages=(*stages[:first], *own, *stages[last:])), shared)
                    )

    def _known(self, template: Template) -> list[Template]:
        try:
            self.predictor.stage_tables(template)
        except KeyError:
            return []
        return [template]

    def _fitted(self, template: Template, shared: Shared) -> Template:
        """Recomputed where it does not fit otherwise."""
        if not self.recompute or not self._known(template):
            return template
        stages: list[Stage] = []
        plain = replace(template, stages=tuple(replace(stage, recompute=False) for stage in template.stages))
        for number, stage in enumerate(plain.stages):
            many = self.predictor.global_batch
            need = self.predictor.memory(
                plain, number, micro_batches=many, schedule="1F1B", replicas=shared[0], zero=shared[1]
            ).total
            stages.append(replace(stage, recompute=need > self.predictor.fleet.pool(stage.pool).memory_bytes))
        return replace(template, stages=tuple(stages))

    def _filled(self, mix: Mix) -> Iterator[Mix]:
        """One more of some column, or as many as there are devices for."""
        pools = {pool.name: pool.devices for pool in self.predictor.fleet.pools}
        for template, count in mix:
            for pool, devices in template.devices.items():
                pools[pool] -= count * devices
        pipelines = sum(count for _, count in mix)
        for column in self.columns:
            most = min(pools[pool] // devices for pool, devices in column.devices.items())
            if self.most_pipelines is not None:
                most = min(most, self.most_pipelines - pipelines)
            if self.usd is not None:
                each, left = self.usd
                spent = sum(n * each[p] * d for t, n in mix for p, d in t.devices.items())
                price = sum(each[p] * d for p, d in column.devices.items())
                most = min(most, int((left - spent) / price * (1 + 1e-9))) if price > 0 else most
            for count in sorted({min(most, 1), most}):
                if count > 0:
                    yield mix_of([*mix, (column, count)])


def climb(
    start: Weighed,
    start_mix: Mix,
    steps: Steps,
    weigh: Callable[[Mix, float], Weighed | None],
    score: Callable[[Weighed], float],
    could_beat: Callable[[Mix, float], bool],
    proceed: Callable[[], bool],
) -> tuple[Weighed, Mix]:
    """Take the first step that is better until there is none, or ``proceed`` says stop. ``could_beat``: False only if it cannot."""
    best, best_mix = start, start_mix
    seen = {start_mix}
    found = True
    while found:
        found = False
        for mix in steps.from_mix(best_mix, best.plan.zero):
            if mix in seen or not mix:
                continue
            seen.add(mix)
            if not could_beat(mix, score(best)):
                continue
            if not proceed():
                return best, best_mix
            weighed = weigh(mix, score(best))
            if weighed is not None and score(weighed) < score(best) * (1 - 1e-9):
                best, best_mix, found = weighed, mix, True
                break
    return best, best_mix


def _place(stage: Stage) -> tuple[str, Widths]:
    return stage.pool, stage.widths


def _less(mix: Mix, template: Template) -> Mix:
    """Without one pipeline of a template."""
    return mix_of((t, n - (t == template)) for t, n in mix)
