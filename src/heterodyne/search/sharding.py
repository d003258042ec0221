"""Shards for plans in which devices with the same weights share the optimizer's state (ZeRO-1), or parameters and gradients too (ZeRO-3).

Shards are as equal as memory allows, and larger behind slow links. To reduce-scatter and all-gather N bytes of which a device keeps s, it
sends N - s over its link, in (N - s) / B seconds. So the step is shortest where no device sends for longer than T, the least for which
shards between N - T B and the free memory can sum to N. Shards in proportion to memory would be wrong: what a large device spares a small
one in memory, the small one sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from heterodyne.cost.model import CostModel
from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.job import Strategy
from heterodyne.plan.boxes import Box
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.plan.weights import PlannedWeights
from heterodyne.search.data_parallel import DataParallel
from heterodyne.search.fit import Fit
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Candidate
from heterodyne.search.predict import overflow, predict, with_stages
from heterodyne.search.relieved import relieved
from heterodyne.sim.run import Simulation

__all__ = ["Sharding", "least_time_shards"]

_PARTS = 1000
"""Shares are told in so many parts: what rounding moves is less than a plan file needs."""
_HALVINGS = 100


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """``runs``: of the devices that can hold the model by themselves; the own rates of all are told by them."""

    model: CostModel
    runs: Mapping[str, MicroBatchChoice]

    def of_whole_models(self, fits: Sequence[Fit], samples: int, strategy: Strategy) -> tuple[Candidate, ...]:
        """Data parallelism of devices that together have room for the state of the model once, with the largest micro-batches for which
        they have; none where each has room for it by itself. ``fits``: what fits each device when none of the state is on it."""
        if len(self.runs) == len(fits):
            return ()
        for limit in sorted({size for fit in fits for size in fit.sizes}, reverse=True):
            sizes = {fit.device.id: tuple(size for size in fit.sizes if size <= limit) for fit in fits}
            # The update, wherever it is made, is left to the simulation.
            runs = {
                device: MicroBatchChoice(
                    seconds=self.model.compute[device].micro_batch_s,
                    sizes=own,
                    fixed_s=self.model.measured(device).step_overhead_s,
                )
                for device, own in sizes.items()
                if own
            }
            uses = {device: self.model.memory_use(device, run.largest) for device, run in runs.items()}
            room = sum(self.model.cluster.device(d).memory_bytes - use.with_state(0).total for d, use in uses.items())
            if len(runs) > 1 and room >= max(use.optimizer for use in uses.values()):
                try:
                    found = DataParallel(model=self.model, runs=runs, samples=samples).candidates(strategy)
                except InfeasibleError:
                    return ()
                return tuple(self.of_state(candidate) for candidate in found if candidate.plan is not None)
        return ()

    def of_plans(self, candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
        """The fastest of the given ones, with its state sharded; none where no two of its devices hold the same weights."""
        best = min((c for c in candidates if c.plan is not None), key=lambda c: c.weighed_s, default=None)
        made = None if best is None or best.plan is None or best.plan.zero else self.of_state(best)
        return () if made is None or made.plan is None else (made,)

    def of_state(self, candidate: Candidate) -> Candidate:
        """The candidate with its state sharded, or why that cannot be."""
        assert candidate.plan is not None  # only such are asked for
        why = "its devices have no room for the state"
        try:
            made, played = self.sharded(candidate.plan, 1) or (None, None)
        except PlanError as error:
            made, played, why = None, None, str(error)
        name = f"{candidate.name}, with sharded state (ZeRO-1)"
        return replace(candidate, name=name, plan=made, simulation=played, why_not="" if made else why)

    def sharded(self, plan: Plan, zero: int) -> tuple[Plan, Simulation] | None:
        """The plan with shards for which its devices have room, and how it is simulated; None if they have not.

        What exchanging shards takes shows only when the plan is simulated: devices that then lack room keep so much less, and others more.
        Raises PlanError for a plan that cannot run.
        """
        first = self._with_shards(*predict(self.model, plan, self.runs), zero)
        if first is None:
            return None
        made, played = relieved(
            self.model, first, self.runs, lambda made, played, _: self._with_shards(made, played, zero)
        )
        return None if overflow(self.model, made, played) else (made, played)

    def _with_shards(self, made: Plan, played: Simulation, zero: int) -> Plan | None:
        """The plan with the shards that its simulation asks for; None if there is no room for it."""
        weights = PlannedWeights.of(made, self.model.graph)
        boxes, parts = weights.boxes, weights.state_parts
        own = {device: self._bytes(device, made, boxes[device], zero) for device in made.devices}
        peaks = {device: played.peak_bytes[self.model.cluster.rank(device)] for device in own}
        room = {
            d: parts.get(d, 1.0) * size + self.model.cluster.device(d).memory_bytes - peaks[d]
            for d, size in own.items()
        }
        groups: dict[tuple[str, ...], int] = {}
        for bucket in weights.buckets:
            groups[bucket.owners] = groups.get(bucket.owners, 0) + bucket.bytes
        held = {d: sum(size for owners, size in groups.items() if d in owners) or 1 for d in own}
        shares: dict[str, int] = {}
        for owners in sorted((o for o in groups if len(o) > 1), key=lambda o: -groups[o]):
            if any(device in shares for device in owners):
                continue  # what little else they share follows the shares of what they share most
            total = max(own[d] * groups[owners] / held[d] for d in owners)
            rounding = total / _PARTS
            left = [room[d] - own[d] * (1 - groups[owners] / held[d]) - rounding for d in owners]
            kept = least_time_shards(total, left, [self._bytes_per_s(d, owners) for d in owners])
            if kept is None:
                return None
            even = max(kept) - min(kept) <= rounding
            shares |= {d: 1 if even else round(_PARTS * size / sum(kept)) for d, size in zip(owners, kept, strict=True)}
        pipelines = tuple(_with_shares(pipeline, shares) for pipeline in made.pipelines)
        return made.model_copy(update={"zero": zero, "predicted": None, "pipelines": pipelines})

    def _bytes(self, device: str, plan: Plan, boxes: Mapping[str, Box], zero: int) -> float:
        """What is sharded of all weights that the device holds, whole."""
        stages = [stage.ops for p in plan.pipelines for stage in p.stages if device in stage.devices]
        use = self.model.memory_use(device, 0, stages, boxes=boxes)
        if zero < 3:
            return use.optimizer
        return (use.optimizer + use.gradients + self.model.graph.trainable_bytes) * (1 + use.lost / use.tensors)

    def _bytes_per_s(self, device: str, owners: Iterable[str]) -> float:
        """Of the best link of a device to another owner: in a ring it has two neighbours."""
        links = [self.model.collectives.send(device, other).s_per_byte for other in owners if other != device]
        return 1 / max(min(links), 1e-15)


def least_time_shards(total: float, room: Sequence[float], bytes_per_s: Sequence[float]) -> tuple[float, ...] | None:
    """The bytes of ``total`` that each device keeps; None if they have no memory for it.

    ``room``: the most that each can keep; ``bytes_per_s``: of its link. Of solutions with the same time, the most equal shards.
    """
    if any(most < 0 for most in room) or sum(room) < total:
        return None
    if total <= 0:
        return (0.0,) * len(room)

    def least(seconds: float) -> list[float]:
        return [max(0.0, total - seconds * rate) for rate in bytes_per_s]

    def enough(seconds: float) -> bool:
        lows = least(seconds)
        return sum(lows) <= total and all(low <= most for low, most in zip(lows, room, strict=True))

    lows = least(_first(enough, total / min(bytes_per_s)))
    level = _first(lambda at: sum(_between(lows, at, room)) >= total, total)
    return _between(lows, level, room)


def _between(lows: Sequence[float], level: float, highs: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(low, min(level, high)) for low, high in zip(lows, highs, strict=True))


def _first(holds: Callable[[float], bool], high: float) -> float:
    """The least value at which what holds at ``high`` and above it does."""
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _with_shares(pipeline: Pipeline, shares: Mapping[str, int]) -> Pipeline:
    """The pipeline with what each of its devices keeps; nothing is said where it is the same of all."""

    def changed(_: int, stage: Stage) -> Stage:
        own = tuple(shares.get(device, 1) for device in stage.devices)
        return stage.model_copy(update={"state_shares": own if set(own) != {1} else None})

    return with_stages(pipeline, changed)
