"""Pipelines: stages of one model on devices in a line. The best drafts are built, given orders, and the best of these simulated.

What bounds the work: only the best few drafts get orders of their own, each with a bounded number of plays; none is made that would be
slower than what is known already even if it never waited; and of those that are built, only those are simulated whose passes alone
are done sooner than the best is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError
from heterodyne.plan.plan import Pipeline
from heterodyne.search.building import Builder, Built, explicit, named
from heterodyne.search.drafts import Draft, Drafting
from heterodyne.search.hosted import reloading
from heterodyne.search.line_drafts import LineDrafts
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import CUTTING_PAYS, FOLDING_PAYS, Candidate, Kind
from heterodyne.search.predict import plan_of, predict, weighed, with_stages
from heterodyne.units import format_seconds

__all__ = ["Pipelines"]

_SMALL = 8 * 16  # places times micro-batches up to which the search for orders is generous
_MOST_PLAYED = 4  # orders of one draft that are simulated
_MOST_ROOMY = 16  # lines that are tried where memory is all that matters


@dataclass(frozen=True, kw_only=True)
class Pipelines:
    """The search for pipelines. ``runs``: of the devices that can hold the whole model."""

    model: CostModel
    runs: Mapping[str, MicroBatchChoice]
    lines: LineDrafts
    _beside: dict[tuple[tuple[int, ...], int], tuple[tuple[str, ...], Pipeline]] = field(
        default_factory=dict, repr=False
    )

    def candidates(self, below_s: float) -> tuple[Candidate, ...]:
        """A pipeline over all devices, and the even cut. Others leave out devices where that is faster (`search.by_class`).

        ``below_s``: what a plan has to be weighed below.
        """
        usable = self.lines.usable
        if len(usable) < 2:
            why = "fewer than two devices can hold any part of the model"
            return (Candidate(name="a pipeline", kind="pipeline", why_not=why),)
        try:
            draft = self.lines.best(usable)
        except InfeasibleError as error:
            if below_s == inf and (roomiest := self._roomiest(usable)):
                return (roomiest,)
            name = f"a pipeline over {self._who(usable)}"
            return (Candidate(name=name, kind="pipeline", why_not=str(error)),)
        best = self._best(draft, below_s)
        if best.plan is None and below_s == inf:
            best = self._roomiest(usable) or best
        return (best, self._even(draft))

    def beside(self, part: tuple[str, ...], samples: int) -> Pipeline:
        """A pipeline over some devices that stands beside others: the one whose passes are done first. Raises InfeasibleError.

        Parts of alike devices get alike pipelines.
        """
        key = (tuple(self.lines.kinds[device] for device in part), samples)
        if key not in self._beside:
            options = list(self._built(self.lines.best(part, samples)))
            if not options:
                raise InfeasibleError(f"no order of the stages of {' + '.join(part)} fits")
            found = explicit(min(options, key=lambda built: built.makespan_s))
            self._beside[key] = (part, found)
        other, pipeline = self._beside[key]
        device_of = dict(zip(other, part, strict=True))
        return with_stages(
            pipeline, lambda _, stage: stage.model_copy(update={"devices": tuple(map(device_of.get, stage.devices))})
        )

    def weighed(self, name: str, kind: Kind, pipelines: tuple[Pipeline, ...], schedule: str) -> Candidate:
        """Simulated, and refused if it does not fit."""
        made = plan_of(self.model, self.lines.samples, pipelines, schedule)
        return weighed(self.model, name, kind, *predict(self.model, made, self.runs))

    def _best(self, draft: Draft, below_s: float) -> Candidate:
        """The fastest of what is built from a draft, or what that takes at least."""
        fine, drafting = self.lines.fine(draft)
        if fine.longest_s / CUTTING_PAYS >= below_s:
            name = f"a pipeline of {len(fine.line)} stages over {self._who(fine.line)}, {fine.micro_batches}"
            why = f"takes at least {format_seconds(fine.longest_s)} a step"
            return Candidate(name=name, kind="pipeline", why_not=why)
        options: list[Candidate] = []
        for built in sorted(self._built(draft), key=self._doubted_s)[:_MOST_PLAYED]:
            if self._doubted_s(built) >= min((c.weighed_s for c in options), default=inf):
                break
            options.append(self._played(built))
        if not options:  # no order fits: what 1F1B lacks is what can be said
            return self._played(self._builder(drafting, fine).plain(fine))
        best = min(options, key=lambda c: c.weighed_s)
        return min((best, *self._reloaded(best)), key=lambda c: c.weighed_s)

    def _roomiest(self, usable: Sequence[str]) -> Candidate | None:
        """Where the fastest cuts fit in no order: of those that leave most memory the fastest that fits; None: there is none.

        Tables of memory lean upwards, so it is what is simulated that fits or does not.
        """
        played: list[Candidate] = []
        for draft in self.lines.roomiest(usable)[:_MOST_ROOMY]:
            builder = self._builder(self.lines.finest, draft)
            built = sorted(builder.best(draft, move=False), key=self._doubted_s)
            played += map(self._played, (*built[:_MOST_PLAYED], builder.leanest(draft)))
        return min((c for c in played if c.plan is not None), key=lambda c: c.weighed_s, default=None)

    def _reloaded(self, best: Candidate) -> Iterator[Candidate]:
        """The same with activations that come back from hosts ahead of their backwards; they need room as long, so not all fit."""
        if best.plan is not None:
            for pipeline in reloading(best.plan.pipelines[0]):
                yield self.weighed(best.name, best.kind, (pipeline,), best.plan.schedule)

    def _played(self, built: Built) -> Candidate:
        return self.weighed(self._name(built), "pipeline", (built.pipeline,), built.schedule or "1F1B")

    @staticmethod
    def _doubted_s(built: Built) -> float:
        """Seconds of its passes, with the doubt that candidates are weighed with."""
        folded = len(built.draft.place_of) > len(built.draft.line)
        return built.makespan_s / (CUTTING_PAYS * (FOLDING_PAYS if folded else 1))

    def _built(self, draft: Draft) -> Iterator[Built]:
        """Pipelines of a draft, with finer cuts where they pay, and with two stages a place."""
        fine, drafting = self.lines.fine(draft)
        builder = self._builder(drafting, fine)
        plain = list(builder.best(fine))
        yield from plain
        best_s = min((built.makespan_s for built in plain), default=inf)
        for placement in ("loop", "v") if len(fine.line) > 1 else ():
            folded = drafting.folded(fine.line, fine.micro_batches, placement)
            if folded is not None and folded.longest_s < best_s * FOLDING_PAYS:
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

    def _even(self, draft: Draft) -> Candidate:
        """As many blocks for each device, in the order of the cluster, with 1F1B: what is done where nothing is known."""
        line = tuple(d.id for d in self.model.cluster.devices if d.id in draft.line)
        even = self.lines.drafting.even(line, draft.micro_batches)
        pipeline = self._builder(self.lines.drafting, even).plain(even).pipeline
        return self.weighed("an even cut with 1F1B", "even", (pipeline,), "1F1B")

    def _name(self, built: Built) -> str:
        stages, places = len(built.draft.place_of), len(built.draft.line)
        folded = ", two a place" if stages > places else ""
        return (
            f"a pipeline of {stages} stages{folded} over {self._who(built.draft.line)}, "
            f"{built.pipeline.micro_batches} with {named(built.schedule)}"
        )

    def _who(self, devices: Sequence[str]) -> str:
        missing = [device.id for device in self.model.cluster.devices if device.id not in devices]
        if not missing:
            return f"all {len(devices)} devices" if len(devices) > 1 else "the only device"
        if len(missing) == 1:
            return f"all devices but {missing[0]}"
        return f"{len(devices)} devices"
