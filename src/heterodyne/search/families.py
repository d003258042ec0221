"""Every way to spread a batch, in an order in which the best come early; ways whose lower bound is no better than the best are skipped.

Whole models first: they are evaluated soonest, and no cut of a model is faster than if no device were ever idle (`search.bound`). Where
that bound is no better, nothing else is tried, and this is reported. Otherwise the search over device classes (`search.by_class`) runs;
pipelines and sharded plans refine what it found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TypeAlias

from heterodyne.cost.model import CostModel
from heterodyne.job import Strategy
from heterodyne.plan.capabilities import CUTTING, Capabilities, Feature
from heterodyne.search.bound import all_at_work_s
from heterodyne.search.by_class import ByClass
from heterodyne.search.data_parallel import DataParallel
from heterodyne.search.expert_places import ExpertPlaces
from heterodyne.search.fit import Fit, fit_devices, runs_of
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.parameter_sharding import ParameterSharding
from heterodyne.search.planned import CUTTING_PAYS, STATE_ELSEWHERE_PAYS, Candidate, Kind
from heterodyne.search.predict import overflow
from heterodyne.search.refine import Refiner
from heterodyne.search.relief import ACTIONS, Action
from heterodyne.search.relieved import offloading
from heterodyne.search.sharding import Sharding
from heterodyne.search.split import Split
from heterodyne.units import format_seconds

__all__ = ["Families"]

_WITHIN = 1.01
"""So near to its bound a plan is taken: predictions are not better."""
_Counts: TypeAlias = tuple[int, ...] | tuple[None]
"""Numbers of micro-batches that are tried one after the other until one can be; None: any."""


@dataclass(frozen=True, kw_only=True)
class Families:
    """Args:
    able: what runs exactly for the model.
    samples: the global batch; sizes: of micro-batches that may be taken, rising.
    sharded: whether state may be sharded.
    near: how many times as long as the fastest a plan may be predicted to take, and is still looked for.
    """

    model: CostModel
    able: Capabilities
    samples: int
    sizes: tuple[int, ...]
    strategy: Strategy
    near: float = 1.0
    sharded: bool = True

    @cached_property
    def fits(self) -> tuple[Fit, ...]:
        features: dict[Action, Feature] = {"recompute": "recompute", "host": "activation_offload"}
        actions = tuple(action for action in ACTIONS if self.able.allow(features[action]))
        return fit_devices(self.model, self.sizes, self.samples, actions=actions)

    @cached_property
    def runs(self) -> dict[str, MicroBatchChoice]:
        """How the devices that can hold the model best run samples."""
        return runs_of(self.model, self.fits)

    def candidates(self, *, on_hosts: bool) -> tuple[Candidate, ...]:
        """All ways. ``on_hosts``: also those in which hosts keep the optimizer's state of devices that lack the room."""
        found = [*self._whole_models()]
        found += self._cut(found)
        found += self._parameters_sharded(found)
        found += self._on_hosts(found) if on_hosts else ()
        sharding = self._sharding
        return (*found, *(() if sharding is None else sharding.of_plans(found)))

    @cached_property
    def _sharding(self) -> Sharding | None:
        if not self.sharded or not self.able.allow("state_sharding") or self.able.reach != "element":
            return None
        return Sharding(model=self.model, runs=self._beside_others)

    def _whole_models(self) -> Iterator[Candidate]:
        # Pipelines take larger parts of the batch, so where that is mathematics they cannot be compared with whole models.
        if self.strategy == "pipeline" and not self.able.allow("unequal_counts"):
            return
        yield from self._replicas[1]
        if self._sharding is not None:
            bare = fit_devices(self.model, self.sizes, self.samples, actions=(), state=0)
            yield from self._sharding.of_whole_models(bare, self.samples, self._of_data)

    @property
    def _of_data(self) -> Strategy:
        """What is asked for of whole models."""
        return "data" if self.strategy in CUTTING else self.strategy

    @property
    def _beside_others(self) -> dict[str, MicroBatchChoice]:
        """How the devices run samples that can hold the model beside what they exchange with others."""
        return self._replicas[0]

    @cached_property
    def _replicas(self) -> tuple[dict[str, MicroBatchChoice], tuple[Candidate, ...]]:
        """Data parallelism, of smaller micro-batches where the program shows that a device has no room for those that fit by themselves;
        and what each device that has room for any runs."""
        runs = dict(self.runs)
        while True:
            found = DataParallel(model=self.model, runs=runs, samples=self.samples).candidates(self._of_data)
            over = {device for c in found for device in self._over(c)}
            if not over:
                return runs, found
            for device in over:
                if len(runs[device].sizes) > 1:
                    runs[device] = replace(runs[device], sizes=runs[device].sizes[:-1])
                else:
                    del runs[device]

    def _over(self, candidate: Candidate) -> Iterable[str]:
        """The devices that lack memory for it."""
        if candidate.plan is None or candidate.simulation is None:
            return ()
        return overflow(self.model, candidate.plan, candidate.simulation)

    def _cut(self, found: Sequence[Candidate]) -> Iterator[Candidate]:
        """Models that are cut, into stages or inside of layers."""
        graph, strategy = self.model.graph, self.strategy
        if strategy in ("data", "equal", "fastest") or len(self.model.cluster.devices) < 2 or len(graph.ops) < 2:
            return
        why_not = self.able.why_not("several_stages")
        if why_not is not None:
            yield Candidate(name="pieces of the model", kind=self._kind, why_not=why_not)
            return
        split = self._split(self._counts(found)[0])
        known = [*found]
        if strategy != "pipeline":
            known += map(self._if_exact, split.as_marked())
            yield from known[len(found) :]
        for number, family in enumerate((self._by_class, self._splits, self._expert_places)):
            if self._at_work_s / CUTTING_PAYS * _WITHIN >= self._below_s(known):
                if not number:
                    why = f"takes at least {format_seconds(self._at_work_s)} a step, if no device ever waits"
                    yield Candidate(name="the model cut into stages or parts", kind=self._kind, why_not=why)
                return
            own = family(found, self._below_s(known))
            known += own
            yield from own

    def _if_exact(self, candidate: Candidate) -> Candidate:
        faults = [] if candidate.plan is None else self.able.faults(candidate.plan)
        return replace(candidate, plan=None, simulation=None, why_not="; ".join(faults)) if faults else candidate

    def _split(self, count: int | None) -> Split:
        return Split(model=self.model, runs=self.runs, samples=self.samples, sizes=self.sizes, count=count)

    @cached_property
    def _at_work_s(self) -> float:
        return all_at_work_s(self.model, self.samples, max(self.sizes))

    def _below_s(self, known: Iterable[Candidate]) -> float:
        """What a plan has to be weighed below to be worth making: nothing yet, or where one way was asked for, any."""
        return self.near * min((c.weighed_s for c in known), default=inf) if self.strategy == "auto" else inf

    @property
    def _kind(self) -> Kind:
        """Of what stands for all that is cut."""
        return self.strategy if self.strategy in ("pipeline", "split", "context") else "pipeline"

    def _by_class(self, found: Sequence[Candidate], below_s: float) -> tuple[Candidate, ...]:
        """By counting devices, refined for them. Of given numbers of micro-batches the first with which any plan can be."""
        own: tuple[Candidate, ...] = ()
        for count in self._counts(found):
            by_class = ByClass(
                split=self._split(count), able=self.able, strategy=self.strategy, sharding=self._sharding
            )
            own = by_class.candidates(below_s)
            if any(c.plan is not None for c in own):
                break
        return own

    def _splits(self, found: Sequence[Candidate], below_s: float) -> tuple[Candidate, ...]:
        """Of the kinds that are asked for and exact: sequences may be split where weights may not."""
        ways: tuple[Strategy, ...] = ("split", "context")
        kinds = [way for way in ways if self.strategy in ("auto", way) and self.able.allow(CUTTING[way])]
        return self._split(self._counts(found)[0]).candidates(kinds, below_s)

    def _expert_places(self, found: Sequence[Candidate], below_s: float) -> tuple[Candidate, ...]:
        """Experts on devices of their own."""
        count = self._counts(found)[0]
        if count is not None or self.strategy == "context":
            return ()
        places = ExpertPlaces(split=self._split(count), able=self.able, refiner=Refiner(model=self.model))
        return places.candidates(below_s)

    def _counts(self, found: Sequence[Candidate]) -> _Counts:
        """Where ops mix the samples of a micro-batch, the number of micro-batches is part of the mathematics: that of data parallelism
        where there is any, else the smallest that fits; anywhere else it is free (None). Never empty."""
        if self.able.allow("unequal_counts"):
            return (None,)
        there = [len(p.micro_batches) for c in found if c.plan is not None for p in c.plan.pipelines]
        return tuple(there[:1] or sorted({-(-self.samples // size) for size in self.sizes}))

    def _parameters_sharded(self, found: Sequence[Candidate]) -> Iterator[Candidate]:
        allowed = (
            self.able.allow("parameter_sharding", "several_stages", "empty_share") and self.able.reach == "element"
        )
        if len(self._beside_others) == len(self.model.cluster.devices) or not allowed:
            return
        if self._at_work_s / STATE_ELSEWHERE_PAYS < self._below_s(found):
            again = self.able.allow("recompute", "several_micro_batches")
            sharded = ParameterSharding(
                model=self.model, runs=self.runs, samples=self.samples, largest=max(self.sizes), recompute=again
            )
            yield sharded.candidate()

    def _on_hosts(self, found: Sequence[Candidate]) -> Iterator[Candidate]:
        """With the optimizer's state of devices that lack room for it on their hosts."""

        def search(helped: CostModel) -> Iterator[Candidate]:
            # A model that is cut needs no host, if that can be: its weights and their state are cut too.
            possible = any(c.plan is not None for c in found) and self.strategy == "auto"
            other = replace(self, model=helped, strategy="data" if possible else self.strategy, sharded=False)
            whole = [*other._whole_models()]
            yield from (*whole, *other._cut(whole))

        yield from offloading(self.model, self._beside_others, search)
