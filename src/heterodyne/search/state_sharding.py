"""Plans that shard optimizer state over devices with the same weights (ZeRO-1): the same plan with its state sharded, and whole models on
devices that can hold them only so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.plan.buckets import planned_buckets
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.plan.state_shards import state_parts
from heterodyne.search.data_parallel import DataParallel
from heterodyne.search.fit import Fit
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Candidate, Strategy
from heterodyne.search.predict import overflow, predict, with_stages
from heterodyne.search.state_shares import PARTS, as_shares, least_time_shards, link_bytes_per_s

__all__ = ["StateSharding"]

_MOST_PLAYED = 4
_NO_ROOM = "its devices have no room for the state"


@dataclass(frozen=True, kw_only=True)
class StateSharding:
    """Args:
    runs: of the devices that can hold the model by themselves; the own rates of all are told by them.
    fits: what of the sizes fits each device when none of the optimizer's state is on it.
    """

    model: CostModel
    runs: Mapping[str, MicroBatchChoice]
    fits: tuple[Fit, ...]
    samples: int

    def of_whole_models(self, strategy: Strategy) -> tuple[Candidate, ...]:
        """Data parallelism of devices that together have room for the state of the model once, with the largest micro-batches for which
        they have; none where each has room for it by itself."""
        if len(self.runs) == len(self.fits):
            return ()
        for limit in sorted({size for fit in self.fits for size in fit.sizes}, reverse=True):
            there = {
                fit.device.id: sizes
                for fit in self.fits
                if (sizes := tuple(size for size in fit.sizes if size <= limit))
            }
            room = [self._room(device, max(sizes)) for device, sizes in there.items()]
            state = max((self._state_bytes(device) for device in there), default=0)
            if len(there) > 1 and sum(room) >= state:
                return self._spread(there, strategy)
        return ()

    def _spread(self, sizes: Mapping[str, tuple[int, ...]], strategy: Strategy) -> tuple[Candidate, ...]:
        runs = {device: self._bare_run(device, of) for device, of in sizes.items()}
        try:
            found = DataParallel(model=self.model, runs=runs, samples=self.samples).candidates(strategy)
        except InfeasibleError:
            return ()
        return tuple(self.sharded(candidate) for candidate in found if candidate.plan is not None)

    def _bare_run(self, device: str, sizes: tuple[int, ...]) -> MicroBatchChoice:
        """Whose update, wherever it is made, is left to the simulation."""
        return MicroBatchChoice(
            seconds=self.model.compute[device].micro_batch_s,
            sizes=sizes,
            fixed_s=self.model.measured(device).step_overhead_s,
        )

    def of_plans(self, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
        """The fastest of the given ones, with its state sharded; none where no two of its devices hold the same weights."""
        best = min((c for c in candidates if c.plan is not None), key=lambda c: c.weighed_s, default=None)
        if best is None or best.plan is None or best.plan.zero:
            return ()
        made = self.sharded(best)
        return (made,) if made.plan is not None else ()

    def sharded(self, candidate: Candidate) -> Candidate:
        """The candidate with its state sharded, or why that cannot be.

        What exchanging shards takes shows only when the plan is played: devices that then lack room keep so much less, and others more.
        """
        named = replace(candidate, name=f"{candidate.name}, with sharded state (ZeRO-1)")
        assert candidate.plan is not None  # only such are asked for
        at_most: dict[str, float] = {}
        for _ in range(_MOST_PLAYED):
            try:
                plan = self._with_shares(candidate.plan, at_most)
                if plan is None:
                    break
                made, simulation = predict(self.model, plan, self.runs)
            except PlanError as error:
                return _refused(named, str(error))
            over = overflow(self.model, made, simulation)
            if not over:
                return replace(named, plan=made, simulation=simulation, why_not="")
            parts = state_parts(plan, self.model.graph)
            at_most |= {d: parts.get(d, 1.0) * self._state_bytes(d, plan) - lacking for d, lacking in over.items()}
        return _refused(named, _NO_ROOM)

    def _with_shares(self, plan: Plan, at_most: Mapping[str, float]) -> Plan | None:
        """The plan with its state sharded; None if there is no room for it. ``at_most``: bytes of it that devices may keep."""
        sharded = plan.model_copy(update={"zero": 1, "predicted": None})
        peak = predict(self.model, plan, self.runs)[1].peak_bytes
        own = {device: self._state_bytes(device, plan) for device in plan.devices}
        free = {d: self.model.cluster.device(d).memory_bytes - peak[self.model.cluster.rank(d)] for d in own}
        room = {d: min(free[d] + own[d], at_most.get(d, inf)) for d in own}
        groups: dict[tuple[str, ...], int] = {}
        for bucket in planned_buckets(plan, self.model.graph):
            groups[bucket.owners] = groups.get(bucket.owners, 0) + bucket.bytes
        weights = self._trained_bytes(groups, own)
        shares: dict[str, int] = {}
        for owners in sorted((o for o in groups if len(o) > 1), key=lambda o: -groups[o]):
            if any(device in shares for device in owners):
                continue  # what little else they share follows the shares of what they share most
            state = max(own[d] * groups[owners] / weights[d] for d in owners)
            rounding = state / PARTS
            left = [room[d] - own[d] * (1 - groups[owners] / weights[d]) - rounding for d in owners]
            kept = least_time_shards(state, left, [link_bytes_per_s(self.model, d, owners) for d in owners])
            if kept is None:
                return None
            even = max(kept) - min(kept) <= state / PARTS
            shares |= dict.fromkeys(owners, 1) if even else as_shares(owners, kept)
        return sharded.model_copy(update={"pipelines": tuple(_with_state(p, shares) for p in sharded.pipelines)})

    @staticmethod
    def _trained_bytes(groups: Mapping[tuple[str, ...], int], devices: Iterable[str]) -> dict[str, int]:
        return {d: sum(size for owners, size in groups.items() if d in owners) or 1 for d in devices}

    def _state_bytes(self, device: str, plan: Plan | None = None) -> int:
        """Of the optimizer, of all weights that the device holds; None: of the whole model."""
        if plan is None:
            return self.model.memory_use(device, 0).optimizer
        stages = [stage.ops for p in plan.pipelines for stage in p.stages if device in stage.devices]
        return self.model.memory_use(device, 0, stages, boxes=self.model.boxes_of(plan)[device]).optimizer

    def _room(self, device: str, size: int) -> int:
        use = self.model.memory_use(device, size).with_state(0)
        return self.model.cluster.device(device).memory_bytes - use.total


def _refused(candidate: Candidate, why: str) -> Candidate:
    return replace(candidate, plan=None, simulation=None, why_not=why)


def _with_state(pipeline: Pipeline, shares: Mapping[str, int]) -> Pipeline:
    """The pipeline with what each of its devices keeps; nothing is said where it is the same of all."""

    def changed(_: int, stage: Stage) -> Stage:
        own = tuple(shares.get(device, 1) for device in stage.devices)
        return stage.model_copy(update={"state_shares": own}) if set(own) != {1} else stage

    return with_stages(pipeline, changed)
