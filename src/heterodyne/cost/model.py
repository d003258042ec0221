"""All that is believed about a model on a cluster, and from it the costs of any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.cluster.profile import DeviceProfile, Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.backward_split import BackwardSplit
from heterodyne.cost.collective import Collectives
from heterodyne.cost.compute import Compute, compute_of
from heterodyne.cost.exchange import Wires
from heterodyne.cost.memory import DeviceMemory, MemoryAssumptions, MemoryUse
from heterodyne.cost.position import Position, slices_of
from heterodyne.cost.rank_step import RankStep
from heterodyne.cost.recipe import Recipe
from heterodyne.cost.routes import Route, routes
from heterodyne.cost.sharded_activations import ShardedActivations
from heterodyne.cost.sharded_stage import ShardedStageCost
from heterodyne.cost.stage_passes import StagePasses
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.errors import MeasureError
from heterodyne.graph.cut import Crossing, crossings
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.boxes import Box
from heterodyne.plan.buckets import Bucket
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.plan.precision import between, precision_of
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.plan.state_shards import state_shares
from heterodyne.plan.weights import PlannedWeights

__all__ = ["CostModel"]

Ops = tuple[int, int]
Boxes = Mapping[str, Box]
"""Of the parameters that a device has a part of, which."""

_Held = tuple[tuple[Ops, ...] | None, frozenset[tuple[str, Box]]]
_WHOLE: Boxes = {}


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Everything that is believed about a model on a cluster. Raises MeasureError where a measurement is missing.

    ``ranks_meet``: whether a step of the runtime ends when all ranks know its loss. ``on_host``: devices whose optimizer's state is taken
    to be in the memory of their hosts, whatever a plan says.
    """

    graph: ModelGraph
    cluster: Cluster
    profile: Profile
    recipe: Recipe = field(default_factory=Recipe)
    memory: MemoryAssumptions = field(default_factory=MemoryAssumptions)
    ranks_meet: bool = True
    on_host: frozenset[str] = frozenset()
    # A search asks often.
    _uses: dict[tuple[str, int, _Held], MemoryUse] = field(default_factory=dict, init=False, repr=False, compare=False)
    _crossings: dict[tuple[int, ...], tuple[Crossing, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _trained: dict[_Held, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _asked: dict[tuple[Pipeline, int, int], ShardedStageCost | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _sharded_stages: dict[tuple[int, tuple[str, ...], bool, bool], ShardedStageCost] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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
    def _halves(self) -> BackwardSplit:
        return BackwardSplit(self.graph)

    @cached_property
    def passes(self) -> StagePasses:
        """Seconds and bytes of stages that one device has whole."""
        return StagePasses(
            graph=self.graph,
            cluster=self.cluster,
            recipe=self.recipe,
            compute=self.compute,
            memory=self.device_memory,
            halves=self._halves,
        )

    def measured(self, device: str) -> DeviceProfile:
        try:
            return self.profile.devices[device]
        except KeyError:
            raise MeasureError(f"{device} was not measured; measure again with 'heterodyne measure'") from None

    def update_s(
        self, device: str, stages: Sequence[Ops] | None = None, boxes: Boxes = _WHOLE, *, on_host: bool = False
    ) -> float:
        """Seconds of the optimizer step, for the parameters of these stages (None: of the whole model)."""
        key = _held(stages, boxes)
        if key not in self._trained:
            self._trained[key] = sum(p.bytes for p in self.device_memory[device].held(stages, boxes) if p.trainable)
        per_byte = self.measured(device).optimizer_s_per_byte
        return self._trained[key] * (self._host_s_per_byte(device) if on_host or device in self.on_host else per_byte)

    def _host_s_per_byte(self, device: str) -> float:
        """Of an update where the host keeps the optimizer's state. Raises MeasureError where that was not measured."""
        measured = self.measured(device)
        if self.cluster.device(device).backend == "cpu":
            # Its own memory is the host's: what goes there is a copy, of the gradients and of the weights.
            return measured.optimizer_s_per_byte * (1 + 4 / self.recipe.update_passes)
        if not measured.host_update_s_per_byte:
            raise MeasureError(f"the update of {device} on its host was not measured; measure again")
        return measured.host_update_s_per_byte

    def clip_s(self, device: str, stages: Sequence[Ops] | None = None, boxes: Boxes = _WHOLE) -> float:
        return self.recipe.clip_to_step * self.update_s(device, stages, boxes)

    def fixed_s(self, device: str) -> float:
        """Seconds of a step that do not depend on the share: clipping, the optimizer, the overhead."""
        update = self.update_s(device)
        return update + self.recipe.clip_to_step * update + self.measured(device).step_overhead_s

    def memory_use(
        self, device: str, size: int, stages: Sequence[Ops] | None = None, boxes: Boxes = _WHOLE
    ) -> MemoryUse:
        """Bytes of a device that runs micro-batches of up to ``size`` samples, one at a time, of these stages (None: the whole model)."""
        key = (device, size, _held(stages, boxes))
        if key not in self._uses:
            use = self.device_memory[device].use(size, stages, boxes)
            self._uses[key] = use.with_state(0) if device in self.on_host else use
        return self._uses[key]

    def sharded_stage(self, pipeline: Pipeline, number: int, row: int = 0) -> ShardedStageCost | None:
        """What the devices of a row of a stage do together where it lies on them in parts; None of one whose devices share the samples.

        Raises PlanError for what cannot be laid out so, MeasureError if nothing is known of a link between them.
        """
        if not pipeline.stages[number].sharded:
            return None
        asked = (pipeline, number, row)
        if asked not in self._asked:
            self._asked[asked] = self._sharded_stage_of(*asked)
        return self._asked[asked]

    def _sharded_stage_of(self, pipeline: Pipeline, number: int, row: int) -> ShardedStageCost | None:
        stage, sharding = pipeline.stages[number], shard_stage(self.graph, pipeline, number)
        if sharding is None:
            return None
        devices = stage.rows[row]
        key = (
            id(sharding),
            devices,
            stage.overlap,
            stage.hierarchical,
        )  # which holds on to the sharding, so that no other one has its id
        if key not in self._sharded_stages:
            self._sharded_stages[key] = ShardedStageCost(
                ops=stage.ops,
                sharding=sharding,
                compute=tuple(self.compute[device] for device in devices),
                balance=tuple(map(self.passes.balance, devices)),
                wires=self._wires(devices),
                halves=self._halves,
                overlap=stage.overlap,
                nodes=tuple(self.cluster.device(device).node for device in devices if stage.hierarchical),
            )
        return self._sharded_stages[key]

    def _wires(self, devices: Sequence[str]) -> Wires:
        # What a step of the optimizer takes is memory traffic.
        passes = self.recipe.update_passes
        copies = [self.measured(device).optimizer_s_per_byte / passes for device in devices]
        return Wires.between(devices, self.cluster, self.collectives, copies)

    def crossings(self, starts: Sequence[int]) -> tuple[Crossing, ...]:
        """What crosses between stages whose first ops are ``starts``."""
        key = tuple(starts)
        if key not in self._crossings:
            self._crossings[key] = crossings(self.graph, key)
        return self._crossings[key]

    def _narrow(self, one: str, other: str) -> bool:
        """Whether two devices send each other activations in 16 bits."""
        ends = (precision_of(self.recipe.precision, self.cluster.device(device).kind) for device in (one, other))
        return between(*ends) != "fp32"

    def of(self, plan: Plan, weights: PlannedWeights | None = None) -> StepCosts:
        """The costs of a plan: any number of pipelines and stages, on one or several devices each.

        ``weights``: those of the plan; None: they are worked out.
        """
        weights = weights or PlannedWeights.of(plan, self.graph)
        boxes, parts = weights.boxes, weights.state_parts
        ranks: list[RankCosts | None] = [None] * len(self.cluster.devices)
        sent: list[Route] = []
        for pipeline, reads in zip(plan.pipelines, weights.reads, strict=True):
            taken = slices_of(pipeline)
            crossing = self.crossings([stage.ops[0] for stage in pipeline.stages])
            travel = routes(crossing, taken, self.cluster, self.collectives, self._narrow)
            sent += travel
            for device in dict.fromkeys(device for stage in pipeline.stages for device in stage.devices):
                at = Position(device, pipeline, taken, boxes[device], reads)
                state = parts.get(device, 1.0)
                of_rank = RankStep(model=self, at=at, plan=plan, buckets=weights.buckets, state=state)
                ranks[self.cluster.rank(device)] = of_rank.costs(crossing, travel)
        alike = not parts and all(set(bucket.owners) == set(plan.devices) for bucket in weights.buckets)
        active = tuple(dict.fromkeys(plan.devices))
        meet = self.ranks_meet and len(active) > 1
        return StepCosts(
            ranks=tuple(ranks),
            **self._collective_s(plan, weights.buckets),
            routes=tuple(sent),
            norm_s=None if alike else self.collectives.meeting_s(active),
            ranks_meet=meet,
            ranks_begin_together=meet and self.graph.loss.count == "tokens",
            meeting_s=self.collectives.meeting_s(active) if meet else 0.0,
        )

    def _collective_s(self, plan: Plan, buckets: Sequence[Bucket]) -> dict[str, tuple[float, ...]]:
        """Seconds in which gradients are reduced, and where state is sharded weights gathered."""
        if not plan.zero:
            return {"reduce_s": tuple(self.collectives.all_reduce(b.owners)(b.bytes) for b in buckets)}
        shares = state_shares(plan)
        half = [self._half_s(plan, bucket, [shares[owner] for owner in bucket.owners]) for bucket in buckets]
        read = [bool(bucket.blocks) or plan.zero < 3 for bucket in buckets]
        gathers = (seconds if each else 0.0 for each, seconds in zip(read, half, strict=True))
        return {"reduce_s": tuple(half), "gather_s": tuple(gathers)}

    def _half_s(self, plan: Plan, bucket: Bucket, shares: Sequence[int]) -> float:
        """Seconds of the reduce-scatter of a bucket, or of its all-gather.

        All-reduces among processors are measured in the memory that workers of one machine share, or by the backend's own algorithm; what
        comes and goes travels there too inside a machine, and between machines with one worker each as our own ring of messages.
        """
        owners = [self.cluster.device(owner) for owner in bucket.owners]
        apart = len({owner.node for owner in owners}) == len(owners) > 1
        if plan.zero > 1 and apart and all(owner.backend == "cpu" for owner in owners):
            return self.collectives.ring_s(bucket.owners, shares, bucket.bytes)
        return self.collectives.reduce_scatter(bucket.owners, shares)(bucket.bytes)

    def kept_by(self, at: Position, number: int, size: int, part: Ops) -> int:
        """Bytes that a part of a stage keeps from forward to backward."""
        if not size:
            return 0
        sharded = self.sharded_activations(at, number)
        return (self.device_memory[at.device] if sharded is None else sharded).activations(size, part)

    def sharded_activations(self, at: Position, number: int) -> ShardedActivations | None:
        """Of a sharded stage."""
        together = self.sharded_stage(at.pipeline, number, at.row(number))
        if together is None:
            return None
        member = at.stages[number].rows[at.row(number)].index(at.device)
        return ShardedActivations(stage=together, member=member, memory=self.device_memory[at.device])

    def host_copy_s_per_byte(self, device: str) -> float:
        """Seconds in which a byte goes to the host of a device, or comes back. Raises MeasureError where that was not measured."""
        measured = self.measured(device)
        if self.cluster.device(device).backend == "cpu":  # a copy in its own memory
            return measured.optimizer_s_per_byte * 2 / self.recipe.update_passes
        if not measured.host_copy_s_per_byte:
            raise MeasureError(f"what copies between {device} and its host take was not measured; measure again")
        return measured.host_copy_s_per_byte


def _held(stages: Sequence[Ops] | None, boxes: Boxes) -> _Held:
    return None if stages is None else tuple(stages), frozenset(boxes.items())
