"""Data parallelism of devices that hold the model only together (ZeRO-3): each keeps a shard of parameters, gradients and optimizer state,
and a stage is unsharded only while it runs.

Every block is a stage, all of them on all devices, breadth first: so each is all-gathered once for its forwards and once for its
backwards, however many micro-batches there are. The devices divide each micro-batch by their speed; the size of each shard is decided by
memory and links alone (see `search.sharding`). Activations of all micro-batches are kept between the forwards and the backwards of a
stage, so more micro-batches save memory only where blocks are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from heterodyne.cost.model import CostModel
from heterodyne.errors import PlanError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.search.balance import balance
from heterodyne.search.micro_batch_choice import MicroBatchChoice
from heterodyne.search.planned import Candidate
from heterodyne.search.points import points_of
from heterodyne.search.predict import plan_of, stage_of, weighed, with_stages
from heterodyne.search.sharding import Sharding

__all__ = ["ParameterSharding"]

_NAME = "all devices, with sharded parameters (ZeRO-3)"


@dataclass(frozen=True, kw_only=True)
class ParameterSharding:
    """Args:
    runs: of the devices that can hold the model by themselves; the own rates of all are told by them.
    largest: the most samples of a micro-batch on one device.
    recompute: whether blocks may be computed again.
    """

    model: CostModel
    runs: Mapping[str, MicroBatchChoice]
    samples: int
    largest: int
    recompute: bool

    def candidate(self) -> Candidate:
        """The fastest that fits, or why none does."""
        devices = tuple(device.id for device in self.model.cluster.devices)
        best: Candidate | None = None
        for plan in self._plans(devices):
            try:
                found = self._played(plan)
            except PlanError as error:
                return Candidate(name=_NAME, kind="balanced", why_not=str(error))
            if found is None:
                continue
            if best is not None and found.weighed_s >= best.weighed_s:
                break  # more micro-batches only take longer
            best = found
        why = "its devices have no room even for a shard of the model beside the two largest of its blocks"
        return Candidate(name=_NAME, kind="balanced", why_not=why) if best is None else self._keeping(best)

    def _played(self, plan: Plan) -> Candidate | None:
        """None if devices have no room for it. Raises PlanError for a plan that cannot run."""
        found = Sharding(model=self.model, runs=self.runs).sharded(plan, 3)
        return None if found is None else weighed(self.model, _NAME, "balanced", *found)

    def _keeping(self, found: Candidate) -> Candidate:
        """With as many stages as fit that keep their parameters from forward to backward, if that is faster. The last ones do so first:
        they wait least for their backwards."""
        assert found.plan is not None  # only such are asked for
        few, many = 0, len(found.plan.pipelines[0].stages)
        while few < many:
            count = (few + many + 1) // 2
            kept = self._played(_keeping_last(found.plan, count))
            if kept is None:
                many = count - 1
                continue
            few = count
            found = min(found, kept, key=lambda c: c.weighed_s)
        return found

    def _plans(self, devices: tuple[str, ...]) -> Iterator[Plan]:
        """What keeps most first: all activations, then only the inputs of blocks, of ever smaller micro-batches."""
        shares = self._shares(devices)
        count = -(-max(shares) // self.largest)
        yield self._plan(devices, shares, count, again=False)
        while self.recompute and count <= max(shares):
            yield self._plan(devices, shares, count, again=True)
            count *= 2

    def _plan(self, devices: tuple[str, ...], shares: Sequence[int], count: int, *, again: bool) -> Plan:
        graph, positions = self.model.graph, points_of(self.model.graph).positions
        stages = []
        for start, stop in pairwise(positions):
            blocks = tuple(b.index for b in graph.blocks if start <= b.start < stop) if again else ()
            stages.append(stage_of((start, stop), devices, tuple(shares), recompute=blocks))
        pipeline = Pipeline(micro_batches=MicroBatches.of_count(self.samples, count), stages=tuple(stages))
        made = plan_of(self.model, self.samples, (pipeline,), schedule="GPipe")
        return made.model_copy(update={"zero": 3})

    def _shares(self, devices: Sequence[str]) -> Sequence[int]:
        """Samples of each device, by its speed."""
        seconds = map(self._seconds_per_sample, devices)
        tables = [[each * samples for samples in range(self.samples + 1)] for each in seconds]
        return balance(tables, self.samples).shares

    def _seconds_per_sample(self, device: str) -> float:
        compute = self.model.compute[device]
        return 1 / compute.rate([size for size in compute.forward.total.sizes if size <= self.largest] or [1.0])


def _keeping_last(plan: Plan, count: int) -> Plan:
    """The plan with so many stages, from the last on, that keep their parameters between forward and backward."""

    (pipeline,) = plan.pipelines
    first = len(pipeline.stages) - count
    kept = with_stages(pipeline, lambda n, stage: stage.model_copy(update={"reshard_after_forward": n < first}))
    return plan.model_copy(update={"predicted": None, "pipelines": (kept,)})
