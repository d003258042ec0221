"""Pipelines: stages of one model on devices in a line, drawn for every order, cut and size that is worth it, the best ones simulated.

What bounds the work: drafts cost table look-ups and are drawn for all orders of up to five devices, beyond that for five seeds
and one round of swaps; only the best few drafts get orders of their own, each with a bounded number of plays; and where even a
pipeline that never waits would be slower than what is known already, none is made but the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError
from heterodyne.plan.capabilities import Capabilities
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline
from heterodyne.search.building import Builder, Built, explicit, named
from heterodyne.search.classes import first_of, interchangeable
from heterodyne.search.drafts import Draft, Drafting, even_draft
from heterodyne.search.lines import Line, Place, groupings, orders, swaps, wide_lines
from heterodyne.search.planned import CLEARLY, Candidate, Kind
from heterodyne.search.points import points_of, sliceable
from heterodyne.search.predict import overflow, plan_of, predict
from heterodyne.search.runs import Runs
from heterodyne.search.tables import Tables
from heterodyne.units import format_bytes

__all__ = ["Pipelines"]

_MOST_POINTS = 220
_MOST_INSIDE = 4
_FINER = 0.99  # cuts inside blocks are taken if they are so much shorter
_SMALL = 8 * 16  # places times micro-batches up to which the search for orders is generous
_MOST_SIZES = 2
_CLOSE = 1e-9
_MOST_PLAYED = 4  # orders of one draft that are simulated


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """The search for pipelines.

    Args:
        runs: of the devices that can hold the whole model.
        sizes: the micro-batch sizes that may be taken.
        count: the number of micro-batches that the mathematics asks for, None where it is free.
    """

    model: CostModel
    runs: Mapping[str, Runs]
    samples: int
    sizes: tuple[int, ...]
    count: int | None = None
    _built: dict[tuple[object, ...], list[Built]] = field(default_factory=dict, repr=False)
    _beside: dict[tuple[tuple[int, ...], int], tuple[tuple[str, ...], Pipeline]] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def drafting(self) -> Drafting:
        return Drafting(
            model=self.model,
            tables=Tables(model=self.model, points=points_of(self.model.graph), like=first_of(self.kinds)),
        )

    @cached_property
    def _finer(self) -> Drafting:
        """With cuts inside the blocks as well."""
        blocks = len(self.model.graph.blocks)
        inside = max(0, min(_MOST_INSIDE, (_MOST_POINTS - blocks) // max(1, blocks)))
        points = points_of(self.model.graph, inside=inside)
        return Drafting(model=self.model, tables=Tables(model=self.model, points=points, like=first_of(self.kinds)))

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(device.id for device in self.model.cluster.devices)

    @cached_property
    def usable(self) -> tuple[str, ...]:
        """The devices that can hold at least some stage."""
        tables = self._finer.tables
        size = min(self.sizes)
        return tuple(d for d in self.devices if tables.holds_any(d, size))

    @cached_property
    def kinds(self) -> dict[str, int]:
        return interchangeable(self.model)

    @cached_property
    def rate(self) -> dict[str, float]:
        """Samples/s of the whole model on each device, at the best of the sizes."""
        compute = self.model.compute
        return {d: Runs(seconds=compute[d].micro_batch_s, sizes=self.sizes).rate for d in self.devices}

    def candidates(self, below_s: float) -> tuple[Candidate, ...]:
        """Pipelines over all devices, over all but one, with places of several devices, and the even cut.

        ``below_s``: the step of the best other plan.
        """
        if len(self.usable) < 2:
            why = "fewer than two devices can hold any part of the model"
            return (Candidate(name="a pipeline", kind="pipeline", why_not=why),)
        try:
            drafts = self.drafts(self.usable)
        except InfeasibleError as error:
            drafts = next(filter(None, map(self._drafts_or_none, groupings(self.usable, self.kinds)[1:])), [])
            if not drafts:
                name = f"a pipeline over {self._who(self.usable)}"
                return (Candidate(name=name, kind="pipeline", why_not=str(error)),)
        tried = drafts[: _MOST_SIZES if self._small(drafts[0]) else 1]
        found = [self._best("pipeline", tried, below_s)]
        limit = min(below_s, found[0].step_s or inf)
        for devices in self._fewer(drafts[0].line):
            fewer = self._drafts_or_none(devices)
            if fewer and fewer[0].estimate_s < min(limit, drafts[0].estimate_s):
                found.append(self._best("pipeline", fewer[:1], limit))
        wide = self._wide(drafts[0])
        if wide is not None and wide.longest_s < CLEARLY * limit:
            found.append(self._best("wide", [wide], limit))
        return (*found, self._even(drafts[0]))

    def drafts(self, devices: Sequence[str], samples: int | None = None) -> list[Draft]:
        """The best draft for each size of micro-batch, best first. Raises InfeasibleError if none fits."""
        samples = self.samples if samples is None else samples
        memory = {d.id: d.memory_bytes for d in self.model.cluster.devices}
        most = len(self.drafting.points) - 1
        kept = sorted(sorted(devices, key=lambda d: -self.rate[d])[:most], key=list(devices).index)
        lines = orders(kept, self.kinds, memory, self.rate)
        failure: InfeasibleError | None = None
        for drafting in (self.drafting, self._finer):  # where memory is short, cuts inside blocks may be what helps
            best: dict[MicroBatches, Draft] = {}
            for micro_batches in self._micro_batches(samples):
                for line in lines:
                    try:
                        draft = drafting.draft(line, micro_batches)
                    except InfeasibleError as error:
                        failure = error
                        continue
                    before = best.get(micro_batches)
                    if before is None or draft.estimate_s < before.estimate_s * (1 - _CLOSE):
                        best[micro_batches] = draft
            if best:
                ranked = sorted(best.values(), key=lambda draft: draft.estimate_s)
                return [self._swapped(drafting, ranked[0]), *ranked[1:]]
        raise failure or InfeasibleError(
            f"{samples} samples cannot be cut into {self.count} micro-batches of at most {max(self.sizes)}"
        )

    def built(self, draft: Draft) -> list[Built]:
        """Pipelines of a draft, with finer cuts where they pay, and with two stages a place."""
        key = (draft.line, draft.micro_batches, draft.points)
        if key not in self._built:
            self._built[key] = list(self._build(draft))
        return self._built[key]

    def beside(self, part: tuple[str, ...], samples: int) -> Pipeline:
        """A pipeline over some devices that stands beside others: the one whose passes are done first. Raises InfeasibleError.

        Parts of alike devices get alike pipelines.
        """
        key = (tuple(self.kinds[device] for device in part), samples)
        if key not in self._beside:
            options = self.built(self.drafts(part, samples)[0])
            if not options:
                raise InfeasibleError(f"no order of the stages of {' + '.join(part)} fits")
            found = explicit(min(options, key=lambda built: built.makespan_s))
            self._beside[key] = (part, found)
        other, pipeline = self._beside[key]
        device_of = dict(zip(other, part, strict=True))
        stages = tuple(
            stage.model_copy(update={"devices": tuple(device_of[device] for device in stage.devices)})
            for stage in pipeline.stages
        )
        return pipeline.model_copy(update={"stages": stages})

    def fine(self, draft: Draft) -> tuple[Draft, Drafting]:
        """The same line cut with more care: inside blocks if that pays."""
        options: list[tuple[Draft, Drafting]] = []
        for drafting in (self.drafting, self._finer) if len(draft.line) > 1 else (self.drafting,):
            try:
                cut = drafting.draft(draft.line, draft.micro_batches, exact=True)
            except InfeasibleError:
                continue  # the other cuts are those that the draft was drawn with
            if not options or cut.estimate_s < options[0][0].estimate_s * _FINER:
                options.insert(0, (cut, drafting))
        return options[0]

    def weighed(self, name: str, kind: Kind, pipelines: tuple[Pipeline, ...], schedule: str) -> Candidate:
        """Simulated, and refused if it does not fit."""
        made, simulation = predict(self.model, plan_of(self.model, self.samples, pipelines, schedule), self.runs)
        over = overflow(self.model, made, simulation)
        if over:
            lacks = ", ".join(f"{device} lacks {format_bytes(size)}" for device, size in over.items())
            return Candidate(name=name, kind=kind, why_not=lacks)
        left_out = tuple(device for device in self.devices if device not in made.devices)
        return Candidate(name=name, kind=kind, plan=made, simulation=simulation, left_out=left_out)

    def _best(self, kind: Kind, drafts: Sequence[Draft], below_s: float) -> Candidate:
        """The fastest of what is built from some drafts."""
        options: list[Candidate] = []
        for draft in drafts:
            fine, drafting = self.fine(draft)
            slow = fine.longest_s >= below_s
            built = [self._builder(drafting, fine).plain(fine)] if slow else self.built(draft)
            built = sorted(built, key=lambda b: b.makespan_s)[:_MOST_PLAYED]
            options += [self.weighed(self._name(b), kind, (b.pipeline,), b.schedule or "1F1B") for b in built]
            if slow:
                break
        if not options:  # no order fits: what 1F1B lacks is what can be said
            fine, drafting = self.fine(drafts[0])
            plain = self._builder(drafting, fine).plain(fine)
            options = [self.weighed(self._name(plain), kind, (plain.pipeline,), plain.schedule)]
        possible = [option for option in options if option.step_s is not None]
        return min(possible or options, key=lambda c: c.weighed_s)

    def _build(self, draft: Draft) -> Iterator[Built]:
        fine, drafting = self.fine(draft)
        builder = self._builder(drafting, fine)
        yield from builder.best(fine)
        for placement in ("loop", "v") if len(fine.line) > 1 else ():
            folded = drafting.folded(fine.line, fine.micro_batches, placement)
            if folded is not None and folded.longest_s < fine.estimate_s:
                yield from builder.best(folded, move=self._small(fine))

    def _builder(self, drafting: Drafting, draft: Draft) -> Builder:
        small = self._small(draft)
        return Builder(
            model=self.model,
            drafting=drafting,
            actions_played=200_000 if small else 30_000,
            refinements=8 if small else 2,
        )

    def _small(self, draft: Draft) -> bool:
        return len(draft.line) * len(draft.micro_batches) <= _SMALL

    def _swapped(self, drafting: Drafting, draft: Draft) -> Draft:
        """One round of swaps of two places."""
        best = draft
        for line in swaps(draft.line, self.kinds):
            try:
                tried = drafting.draft(line, draft.micro_batches)
            except InfeasibleError:
                continue
            if tried.estimate_s < best.estimate_s * (1 - _CLOSE):
                best = tried
        return best

    def _micro_batches(self, samples: int) -> list[MicroBatches]:
        if self.count is not None:
            fits = self.count <= samples <= self.count * max(self.sizes)
            counts = [self.count] if fits else []
        else:
            counts = sorted({-(-samples // min(size, samples)) for size in self.sizes}, reverse=True)
        return [MicroBatches(tuple(sorted(MicroBatches.of_count(samples, count).sizes))) for count in counts]

    def _drafts_or_none(self, devices: Sequence[str]) -> list[Draft]:
        try:
            return self.drafts(devices)
        except InfeasibleError:
            return []

    def _fewer(self, line: Line) -> list[tuple[str, ...]]:
        """All devices but one, at most four ways, the slowest left out first."""
        if len(line) < len(self.usable):
            return []
        groups = groupings(self.usable, self.kinds)[1:]
        return sorted(groups, key=lambda group: -sum(self.rate[d] for d in group))[:4]

    def _wide(self, draft: Draft) -> Draft | None:
        """The best draft with places of several devices, at the size of another draft and at larger ones.

        Not where ops mix samples, nor where what crosses does not follow the batch: neighbours exchange slices of it.
        """
        if not Capabilities(self.model.graph).allow("empty_share") or not sliceable(self.model.graph):
            return None
        best: Draft | None = None
        for micro_batches in self._micro_batches(self.samples):
            for line in wide_lines(draft.line, self.kinds, self.rate, min(micro_batches.sizes)):
                try:
                    tried = self.drafting.draft(line, micro_batches)
                except InfeasibleError:
                    continue
                if best is None or tried.estimate_s < best.estimate_s * (1 - _CLOSE):
                    best = tried
        return best

    def _even(self, draft: Draft) -> Candidate:
        """As many blocks for each device, in the order of the cluster, with 1F1B: what is done where nothing is known."""
        used = {device for place in draft.line for device in place.devices}
        line = tuple(Place(devices=(d,)) for d in self.devices if d in used)
        even = even_draft(line, draft.micro_batches, self.drafting.points)
        pipeline = self._builder(self.drafting, even).plain(even).pipeline
        return self.weighed("an even cut with 1F1B", "even", (pipeline,), "1F1B")

    def _name(self, built: Built) -> str:
        stages, places = len(built.draft.place_of), len(built.draft.line)
        devices = [device for place in built.draft.line for device in place.devices]
        folded = ", two a place" if stages > places else ""
        on = f" on {places} places" if len(devices) > places else ""
        return (
            f"a pipeline of {stages} stages{folded}{on} over {self._who(devices)}, "
            f"{built.pipeline.micro_batches} with {named(built.schedule)}"
        )

    def _who(self, devices: Sequence[str]) -> str:
        missing = [device for device in self.devices if device not in devices]
        if not missing:
            return f"all {len(self.devices)} devices" if len(self.devices) > 1 else "the only device"
        if len(missing) == 1:
            return f"all devices but {missing[0]}"
        return f"{len(devices)} devices"
