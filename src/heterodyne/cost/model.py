"""All that is believed about a model on a cluster, and from it the costs of any plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.cluster.profile import DeviceProfile, Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.collective import Collectives
from heterodyne.cost.compute import Compute, Pass, compute_of
from heterodyne.cost.halves import Halves
from heterodyne.cost.memory import DeviceMemory, MemoryAssumptions, MemoryUse
from heterodyne.cost.recipe import Recipe
from heterodyne.cost.routes import Route, routes
from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.errors import MeasureError
from heterodyne.graph.cut import Crossing, crossings
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.size import ZERO, Size
from heterodyne.plan.buckets import Bucket, planned_buckets
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.plan.slices import slices
from heterodyne.plan.traffic import PARCELS_AHEAD

__all__ = ["CostModel", "slices_of"]

Ops = tuple[int, int]
_NORM_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Everything that is believed about a model on a cluster. Raises MeasureError where a measurement is missing.

    ``ranks_meet``: whether a step of the runtime ends when all ranks know its loss.
    """

    graph: ModelGraph
    cluster: Cluster
    profile: Profile
    recipe: Recipe = field(default_factory=Recipe)
    memory: MemoryAssumptions = field(default_factory=MemoryAssumptions)
    ranks_meet: bool = True
    _uses: dict[tuple[str, int, tuple[Ops, ...] | None], MemoryUse] = field(
        default_factory=dict, repr=False, compare=False
    )  # a search asks often, here as below
    _crossings: dict[tuple[int, ...], tuple[Crossing, ...]] = field(default_factory=dict, repr=False, compare=False)
    _entering: dict[Ops, Size] = field(default_factory=dict, repr=False, compare=False)
    _reads: dict[Ops, frozenset[str]] = field(default_factory=dict, repr=False, compare=False)
    _trained: dict[tuple[Ops, ...] | None, int] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def compute(self) -> dict[str, Compute]:
        """The time curves of every device."""
        return {d.id: compute_of(self.graph, d.id, self.measured(d.id)) for d in self.cluster.devices}

    @cached_property
    def device_memory(self) -> dict[str, DeviceMemory]:
        return {
            d.id: DeviceMemory(
                graph=self.graph,
                device=d,
                recipe=self.recipe,
                profile=self.measured(d.id),
                assumptions=self.memory,
            )
            for d in self.cluster.devices
        }

    @cached_property
    def collectives(self) -> Collectives:
        return Collectives(cluster=self.cluster, samples=self.profile.links)

    @cached_property
    def _halves(self) -> Halves:
        return Halves(self.graph)

    def measured(self, device: str) -> DeviceProfile:
        try:
            return self.profile.devices[device]
        except KeyError:
            raise MeasureError(f"{device} was not measured; measure again with 'heterodyne measure'") from None

    def update_s(self, device: str, stages: Sequence[Ops] | None = None) -> float:
        """Seconds of the optimizer step, for the parameters of these stages (None: of the whole model)."""
        key = None if stages is None else tuple(stages)
        if key not in self._trained:
            self._trained[key] = sum(p.bytes for p in self.device_memory[device].held(key) if p.trainable)
        return self.measured(device).optimizer_s_per_byte * self._trained[key]

    def clip_s(self, device: str, stages: Sequence[Ops] | None = None) -> float:
        return self.recipe.clip_to_step * self.update_s(device, stages)

    def fixed_s(self, device: str, stages: Sequence[Ops] | None = None) -> float:
        """Seconds of a step that do not depend on the share: clipping, the optimizer, the overhead."""
        update = self.update_s(device, stages)
        return update + self.recipe.clip_to_step * update + self.measured(device).step_overhead_s

    def memory_use(self, device: str, size: int, stages: Sequence[Ops] | None = None) -> MemoryUse:
        """Bytes of a device that runs micro-batches of up to ``size`` samples, one at a time, of these stages (None: the whole model)."""
        key = (device, size, None if stages is None else tuple(stages))
        if key not in self._uses:
            self._uses[key] = self.device_memory[device].use(size, stages)
        return self._uses[key]

    def crossings(self, starts: Sequence[int]) -> tuple[Crossing, ...]:
        """What crosses between stages whose first ops are ``starts``."""
        key = tuple(starts)
        if key not in self._crossings:
            self._crossings[key] = crossings(self.graph, key)
        return self._crossings[key]

    def stage(
        self,
        device: str,
        ops: Ops,
        sizes: Sequence[int],
        *,
        recompute: Iterable[int] = (),
        entering: Size = ZERO,
        leaving: Size = ZERO,
    ) -> StageCosts:
        """The costs of a stage on a device, for micro-batches of these sizes.

        Args:
            ops: ``[start, stop)``.
            recompute: the blocks (their indices) whose activations are not kept.
            entering, leaving: bytes of what crosses into the stage and out of it, in samples.
        """
        again = self._recomputed(ops, recompute)
        made = {size: self._passes(device, ops, size, again, entering, leaving) for size in set(sizes)}
        columns = list(zip(*(made[size] for size in sizes), strict=True)) or [()] * 10
        forward, backward, inputs, weights, redo, kept, recomputed, redone, left, gradients = columns
        return StageCosts(
            forward_s=forward,
            backward_s=backward,
            input_s=inputs,
            weight_s=weights,
            recompute_s=redo,
            kept_bytes=kept,
            recomputed_bytes=recomputed,
            redone_bytes=redone,
            weight_bytes=left,
            gradient_bytes=gradients,
        )

    def _passes(
        self, device: str, ops: Ops, size: int, again: Sequence[Ops], entering: Size, leaving: Size
    ) -> tuple[float, float, float, float, float, int, int, int, int, int]:
        """One value for each field of `StageCosts`."""
        compute, memory = self.compute[device], self.device_memory[device]

        def seconds(kind: Pass, part: Ops) -> float:
            return compute.seconds(kind, part, size)

        def with_loss(tensors: float) -> int:
            return round(tensors) + memory.lost(tensors)

        if size == 0:
            return 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0
        dropped = [memory.activations(size, part) for part in again]
        inputs = sum(self._read_by(part)(size) for part in again)
        crossing = entering(size) + leaving(size)
        kept = max(0, memory.activations(size, ops) - sum(dropped)) + inputs + crossing
        return (
            seconds("F", ops),
            seconds("B", ops),
            seconds("I", ops),
            seconds("W", ops),
            sum(seconds("F", part) for part in again),
            with_loss(kept),
            with_loss(sum(dropped)),
            with_loss(max(dropped, default=0)),
            with_loss(self._halves.weight_bytes(*ops)(size)),
            with_loss(crossing),
        )

    def _recomputed(self, ops: Ops, blocks: Iterable[int]) -> list[Ops]:
        """The parts of the stage that lie in those blocks."""
        parts = [
            (max(ops[0], b.start), min(ops[1], b.stop)) for b in map(self.graph.blocks.__getitem__, sorted(blocks))
        ]
        return [part for part in parts if part[0] < part[1]]

    def _read_by(self, part: Ops) -> Size:
        """Bytes of what the ops of a part read of those before it."""
        if part not in self._entering:
            into = [c for c in self.crossings((0, *part) if part[0] else part) if c.producer == 0 and 1 in c.consumers]
            self._entering[part] = Size.total(c.bytes for c in into) if part[0] else ZERO
        return self._entering[part]

    def _read_in(self, ops: Ops) -> frozenset[str]:
        """The names of the parameters that the ops read."""
        if ops not in self._reads:
            self._reads[ops] = frozenset(name for op in self.graph.ops[ops[0] : ops[1]] for name in op.parameters)
        return self._reads[ops]

    def of(self, plan: Plan) -> StepCosts:
        """The costs of a plan: any number of pipelines and stages, on one or several devices each."""
        buckets = planned_buckets(plan, self.graph)
        ranks: list[RankCosts | None] = [None] * len(self.cluster.devices)
        sent: list[Route] = []
        for pipeline in plan.pipelines:
            taken = slices_of(pipeline)
            crossing = self.crossings([stage.ops[0] for stage in pipeline.stages])
            travel = routes(crossing, taken, self.cluster, self.collectives)
            sent += travel
            for device in dict.fromkeys(device for stage in pipeline.stages for device in stage.devices):
                ranks[self.cluster.rank(device)] = self._rank(device, pipeline, taken, crossing, travel, buckets)
        alike = all(set(bucket.owners) == set(plan.devices) for bucket in buckets)
        active = tuple(dict.fromkeys(plan.devices))
        return StepCosts(
            ranks=tuple(ranks),
            reduce_s=tuple(self.collectives.all_reduce(bucket.owners)(bucket.bytes) for bucket in buckets),
            routes=tuple(sent),
            norm_s=None if alike else self.collectives.all_reduce(active)(_NORM_BYTES),
            ranks_meet=self.ranks_meet and len(active) > 1,
        )

    def _rank(
        self,
        device: str,
        pipeline: Pipeline,
        taken: Sequence[Mapping[str, Sequence[tuple[int, int]]]],
        crossing: Sequence[Crossing],
        travel: Sequence[Route],
        buckets: Sequence[Bucket],
    ) -> RankCosts:
        rank, measured = self.cluster.rank(device), self.measured(device)
        mine = {number: stage for number, stage in enumerate(pipeline.stages) if device in stage.devices}
        sizes = {number: tuple(count for _, count in taken[number][device]) for number in mine}
        costs = {}
        for number, stage in mine.items():
            # What a stage of the same rank has made is there already.
            into = [c for c in crossing if number in c.consumers and c.producer not in mine]
            out = [c for c in crossing if c.producer == number]
            costs[number] = self.stage(
                device,
                stage.ops,
                sizes[number],
                recompute=stage.recompute,
                entering=Size.total(c.bytes for c in into),
                leaving=Size.total(c.bytes for c in out),
            )
        stages = tuple(stage.ops for stage in mine.values())
        memory = self.device_memory[device]
        largest = {number: max(own, default=0) for number, own in sizes.items()}
        # Room is made for messages ahead, and what is sent stays until it has left.
        under_way = PARCELS_AHEAD * sum(
            max(route.bytes, default=0) for route in travel if rank in (route.destination[0], route.source[0])
        )
        return RankCosts(
            stages=costs,
            ready={
                bucket.index: self._ready(device, bucket, mine, sizes) for bucket in buckets if device in bucket.owners
            },
            clip_s=self.clip_s(device, stages),
            step_s=self.update_s(device, stages),
            overhead_s=measured.step_overhead_s,
            overlap=min(1.0, max(0.0, measured.overlap)),
            fixed_bytes=self.memory_use(device, 0, stages).fixed,
            workspace_bytes=under_way + max(memory.workspace(largest[n], stage.ops) for n, stage in mine.items()),
            update_bytes=self.memory_use(device, 0, stages).update,
        )

    def _ready(
        self, device: str, bucket: Bucket, mine: Mapping[int, Stage], sizes: Mapping[int, Sequence[int]]
    ) -> tuple[tuple[int, float], ...]:
        """The stages that complete a bucket, each with the fraction of its last backward; all of them for what no op reads."""
        names = set(bucket.parameters)
        ready = []
        for number, stage in mine.items():
            if not any(sizes[number]):
                continue
            if not bucket.blocks:
                ready.append((number, 1.0))
            elif not names.isdisjoint(self._read_in(stage.ops)):
                first = next(block.index for block in self.graph.blocks if block.stop > stage.ops[0])
                block = self.graph.blocks[bucket.ready_block(first)]
                size = next(size for size in reversed(sizes[number]) if size)
                ready.append((number, self.compute[device].ready_fraction(block.start, stage.ops, size)))
        return tuple(ready)


def slices_of(pipeline: Pipeline) -> tuple[dict[str, tuple[tuple[int, int], ...]], ...]:
    """For each stage its devices, each with its ``(first sample, count)`` of every micro-batch, counted within the micro-batch."""
    made = []
    for stage in pipeline.stages:
        shares = next((r.layout.shares for r in stage.regions if r.task_graph == "*"), (1,) * len(stage.devices))
        cut = {size: slices(size, shares) for size in set(pipeline.micro_batches.sizes)}
        made.append(
            {
                device: tuple(cut[size][place] for size in pipeline.micro_batches.sizes)
                for place, device in enumerate(stage.devices)
            }
        )
    return tuple(made)
