"""All that is believed about a model on a cluster, and from it the costs of any plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from heterodyne.cluster.profile import DeviceProfile, Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.again import Again, parts_again
from heterodyne.cost.arriving import Arriving, at_most, by_block
from heterodyne.cost.balance import operations_a_byte
from heterodyne.cost.collective import Collectives
from heterodyne.cost.coming import Coming
from heterodyne.cost.compute import Compute, Pass, compute_of
from heterodyne.cost.exchange import Wires
from heterodyne.cost.gathered import gathered
from heterodyne.cost.halves import Halves
from heterodyne.cost.hosted import Part, on_host
from heterodyne.cost.in_parts import InParts
from heterodyne.cost.member import member_costs
from heterodyne.cost.memory import DeviceMemory, MemoryAssumptions, MemoryUse
from heterodyne.cost.parts_kept import KeptInParts
from heterodyne.cost.position import Position, slices_of
from heterodyne.cost.recipe import Recipe
from heterodyne.cost.routes import Route, routes
from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, StepCosts
from heterodyne.errors import MeasureError
from heterodyne.graph.cut import Crossing, crossings
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.size import ZERO, Size
from heterodyne.plan.boxes import Box
from heterodyne.plan.buckets import Bucket, holdings_of, planned_buckets, room_bytes, stages_reading
from heterodyne.plan.order import orders_of
from heterodyne.plan.plan import Pipeline, Plan, Stage
from heterodyne.plan.precision import between, precision_of
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.plan.state_shards import state_parts, state_shares
from heterodyne.plan.traffic import MESSAGES_AHEAD

__all__ = ["CostModel", "slices_of"]

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
    _uses: dict[tuple[str, int, _Held], MemoryUse] = field(
        default_factory=dict, repr=False, compare=False
    )  # a search asks often, here as below
    _crossings: dict[tuple[int, ...], tuple[Crossing, ...]] = field(default_factory=dict, repr=False, compare=False)
    _entering: dict[tuple[int, int, int], Size] = field(default_factory=dict, repr=False, compare=False)
    _reads: dict[Ops, frozenset[str]] = field(default_factory=dict, repr=False, compare=False)
    _trained: dict[_Held, int] = field(default_factory=dict, repr=False, compare=False)
    _redone: dict[tuple[str, Again, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _asked: dict[tuple[Pipeline, int, int], InParts | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _in_parts: dict[tuple[int, tuple[str, ...], bool], InParts] = field(
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
    def _halves(self) -> Halves:
        return Halves(self.graph)

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

    def fixed_s(self, device: str, stages: Sequence[Ops] | None = None) -> float:
        """Seconds of a step that do not depend on the share: clipping, the optimizer, the overhead."""
        update = self.update_s(device, stages)
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

    def boxes_of(self, plan: Plan) -> dict[str, dict[str, Box]]:
        """For each device of a plan, of the parameters and buffers that it has a part of, which."""
        found: dict[str, dict[str, Box]] = {device: {} for device in plan.devices}
        if any(stage.sharded for pipeline in plan.pipelines for stage in pipeline.stages):
            for name, of in holdings_of(plan, self.graph).items():
                for device, box in of.items():
                    if box:
                        found[device][name] = box
        return found

    def in_parts(self, pipeline: Pipeline, number: int, row: int = 0) -> InParts | None:
        """What the devices of a row of a stage do together where it lies on them in parts; None of one whose devices share the samples.

        Raises PlanError for what cannot be laid out so, MeasureError if nothing is known of a link between them.
        """
        if not pipeline.stages[number].sharded:
            return None
        asked = (pipeline, number, row)
        if asked not in self._asked:
            self._asked[asked] = self._in_parts_of(*asked)
        return self._asked[asked]

    def _in_parts_of(self, pipeline: Pipeline, number: int, row: int) -> InParts | None:
        stage, sharding = pipeline.stages[number], shard_stage(self.graph, pipeline, number)
        if sharding is None:
            return None
        devices = stage.rows[row]
        key = (id(sharding), devices, stage.overlap)  # which holds on to the sharding, so that no other one has its id
        if key not in self._in_parts:
            self._in_parts[key] = InParts(
                ops=stage.ops,
                sharding=sharding,
                compute=tuple(self.compute[device] for device in devices),
                balance=tuple(map(self.balance, devices)),
                wires=self._wires(devices),
                halves=self._halves,
                overlap=stage.overlap,
            )
        return self._in_parts[key]

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

    def stage(
        self,
        device: str,
        ops: Ops,
        sizes: Sequence[int],
        *,
        recompute: Collection[int] = (),
        keep: Sequence[str] = (),
        entering: Size = ZERO,
        leaving: Size = ZERO,
    ) -> StageCosts:
        """The costs of a stage on a device, for micro-batches of these sizes.

        Args:
            ops: ``[start, stop)``.
            recompute: the blocks (their indices) whose activations are not kept, but for what ``keep`` names.
            entering, leaving: bytes of what crosses into the stage and out of it, in samples.
        """
        again = parts_again(self.graph, ops, recompute, keep)
        # What crosses into the stage is there already, as what crosses; but of several micro-batches its gradients wait besides.
        since = ops[0] if sum(size > 0 for size in sizes) == 1 else 0
        made = {size: self._passes(device, ops, size, again, entering, leaving, since) for size in set(sizes)}
        columns = list(zip(*(made[size] for size in sizes), strict=True)) or [()] * 11
        forward, backward, inputs, weights, halved, redo, kept, recomputed, redone, left, gradients = columns
        return StageCosts(
            forward_s=forward,
            backward_s=backward,
            input_s=inputs,
            weight_s=weights,
            halved_forward_s=halved,
            recompute_s=redo,
            kept_bytes=kept,
            recomputed_bytes=recomputed,
            redone_bytes=redone,
            weight_bytes=left,
            gradient_bytes=gradients,
        )

    def _passes(
        self, device: str, ops: Ops, size: int, again: Sequence[Again], entering: Size, leaving: Size, since: int
    ) -> tuple[float, float, float, float, float, float, int, int, int, int, int]:
        """One value for each field of `StageCosts`. ``since``: the op from which on what is read again counts as kept for that."""
        compute, memory = self.compute[device], self.device_memory[device]

        def seconds(kind: Pass, part: Ops) -> float:
            return compute.seconds(kind, part, size)

        def with_loss(tensors: float) -> int:
            return round(tensors) + memory.lost(tensors)

        if size == 0:
            return 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0
        dropped = [memory.activations(size, part.ops) for part in again]
        inputs = sum(self._read_by(part.ops, since)(size) for part in again)
        inputs += sum(a.kept_bytes(self.graph, size, saved) for a, saved in zip(again, dropped, strict=True))
        made_again = [self._beside(part.ops, ops, size) for part in again]
        crossing = entering(size) + leaving(size)
        kept = max(0, memory.activations(size, ops) - sum(dropped)) + inputs + crossing
        return (
            seconds("F", ops),
            seconds("B", ops),
            seconds("I", ops),
            seconds("W", ops),
            seconds("H", ops),
            sum(self.again_s(device, part, size) for part in again),
            with_loss(kept),
            with_loss(sum(dropped)),
            with_loss(max((a + b for a, b in zip(dropped, made_again, strict=True)), default=0)),
            with_loss(self._halves.weight_bytes(*ops)(size)),
            with_loss(crossing),
        )

    def again_s(self, device: str, part: Again, size: int) -> float:
        """Seconds of what is computed again of a micro-batch."""
        key = (device, part, size)
        if key not in self._redone:
            redone = part.redone(self.graph, size, self.balance(device))
            self._redone[key] = redone * self.compute[device].seconds("F", part.ops, size)
        return self._redone[key]

    def balance(self, device: str) -> float:
        """Operations that it does while its memory moves a byte."""
        each = self.cluster.device(device)
        return operations_a_byte(each, precision_of(self.recipe.precision, each.kind))

    def _beside(self, part: Ops, ops: Ops, size: int) -> float:
        """Bytes of what was kept of the first time behind a part that is made again, which makes it too, and of its gradient. What leaves
        the stage is counted as that."""
        return 2 * self._read_by((part[1], len(self.graph.ops)))(size) if part[1] < ops[1] else 0.0

    def _narrow(self, one: str, other: str) -> bool:
        """Whether two devices send each other activations in 16 bits."""
        ends = (precision_of(self.recipe.precision, self.cluster.device(device).kind) for device in (one, other))
        return between(*ends) != "fp32"

    def _read_by(self, part: Ops, since: int = 0) -> Size:
        """Bytes of what the ops of a part read of those before it, from op ``since`` on."""
        key = (since, *part)
        if key not in self._entering:
            starts = tuple(sorted({0, *key}))
            made, read = starts.index(since), starts.index(part[0])
            into = [c for c in self.crossings(starts) if c.producer == made and read in c.consumers and made < read]
            self._entering[key] = Size.total(c.bytes for c in into)
        return self._entering[key]

    def _read_in(self, ops: Ops) -> frozenset[str]:
        """The names of the parameters that the ops read."""
        if ops not in self._reads:
            self._reads[ops] = frozenset(name for op in self.graph.ops[ops[0] : ops[1]] for name in op.parameters)
        return self._reads[ops]

    def of(self, plan: Plan) -> StepCosts:
        """The costs of a plan: any number of pipelines and stages, on one or several devices each."""
        buckets = planned_buckets(plan, self.graph)
        boxes, parts = self.boxes_of(plan), state_parts(plan, self.graph)
        ranks: list[RankCosts | None] = [None] * len(self.cluster.devices)
        sent: list[Route] = []
        for pipeline in plan.pipelines:
            taken = slices_of(pipeline)
            crossing = self.crossings([stage.ops[0] for stage in pipeline.stages])
            travel = routes(crossing, taken, self.cluster, self.collectives, self._narrow)
            sent += travel
            for device in dict.fromkeys(device for stage in pipeline.stages for device in stage.devices):
                at = Position(device, pipeline, taken, boxes[device])
                ranks[self.cluster.rank(device)] = self._rank(
                    at, crossing, travel, buckets, parts.get(device, 1.0), plan
                )
        alike = not parts and all(set(bucket.owners) == set(plan.devices) for bucket in buckets)
        active = tuple(dict.fromkeys(plan.devices))
        meet = self.ranks_meet and len(active) > 1
        return StepCosts(
            ranks=tuple(ranks),
            **self._collective_s(plan, buckets),
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
        if plan.zero < 3:
            return {"reduce_s": tuple(half), "gather_s": tuple(half)}
        return {
            "reduce_s": tuple(half),
            "gather_s": tuple(seconds if b.blocks else 0.0 for b, seconds in zip(buckets, half, strict=True)),
        }

    def _half_s(self, plan: Plan, bucket: Bucket, shares: Sequence[int]) -> float:
        """Seconds of the reduce-scatter of a bucket, or of its all-gather.

        All-reduces among processors are measured in the memory that workers of one machine share, or by the backend's own algorithm; what
        comes and goes travels there too inside a machine, and between machines as our own ring of messages.
        """
        owners = [self.cluster.device(owner) for owner in bucket.owners]
        apart = len({owner.node for owner in owners}) > 1
        if plan.zero > 1 and apart and all(owner.backend == "cpu" for owner in owners):
            return self.collectives.ring_s(bucket.owners, shares, bucket.bytes)
        return self.collectives.reduce_scatter(bucket.owners, shares)(bucket.bytes)

    def _carried_s(self, device: str, stages: Sequence[Ops], boxes: Boxes, state: float) -> float:
        """Seconds of the copies that carry new weights where state is shared out: the own ones into the buffer, then all out of it."""
        return 2 / self.recipe.update_passes * (state + 1) * self.update_s(device, stages, boxes)

    def _rank(
        self,
        at: Position,
        crossing: Sequence[Crossing],
        travel: Sequence[Route],
        buckets: Sequence[Bucket],
        state: float,
        plan: Plan,
    ) -> RankCosts:
        """``state``: the part of its weights that the rank updates."""
        device, mine = at.device, at.stages
        rank, measured = self.cluster.rank(device), self.measured(device)
        costs, workspace, holes = {}, 0, 0
        coming = Coming.of(self, at, buckets, state, plan)
        halved = any("W" in row for row in at.pipeline.order) or SCHEDULES[plan.schedule].halves
        for number in mine:
            # What a stage of the same rank has made is there already.
            into = Size.total(c.bytes for c in crossing if number in c.consumers and c.producer not in mine)
            out = Size.total(c.bytes for c in crossing if c.producer == number)
            arriving = coming.of_stage(number)
            # Halves of backwards keep some of it; of what is made again, shared out or on hosts there are other accounts.
            released = not (halved or plan.zero > 1 or mine[number].recompute or mine[number].offload_activations)
            stage, needed = self._stage_of(at, number, into, out, bool(arriving.first or arriving.last), released)
            costs[number] = self._with_arriving(at, number, stage, arriving, released)
            if mine[number].offload_activations:
                costs[number], passing = self._on_host(at, number, costs[number])
                needed += passing
            workspace = max(workspace, needed)
            holes = max(holes, self.device_memory[device].holes(max(at.sizes(number), default=0), mine[number].ops))
        ranges = tuple(stage.ops for stage in mine.values())
        on_host = any(stage.offload for stage in mine.values())
        alone = self.memory_use(device, 0, ranges, at.boxes).with_state(0 if on_host else state)
        fixed = self.shared_out(alone, plan, device, buckets, state) if plan.zero else alone
        carried = self._carried_s(device, ranges, at.boxes, state) if plan.zero in (1, 2) else 0.0
        lost = self.device_memory[device].lost
        begins = alone.parameters - round((1 - state) * coming.trained) if plan.zero > 2 else alone.parameters
        comes = fixed.gradients + fixed.parameters - begins if plan.zero > 1 else coming.alone
        return RankCosts(
            stages=costs,
            ready={bucket.index: self._ready(at, bucket) for bucket in buckets if device in bucket.owners},
            clip_s=state * self.clip_s(device, ranges, at.boxes),
            step_s=state * self.update_s(device, ranges, at.boxes, on_host=on_host) + carried,
            overhead_s=measured.step_overhead_s,
            overlap=min(1.0, max(0.0, measured.overlap)),
            fixed_bytes=fixed.fixed + (self._rooms(device, buckets) if plan.zero > 1 else 0),
            workspace_bytes=_under_way(travel, rank) + workspace,
            holes_bytes=holes,
            update_bytes=fixed.update,
            coming_bytes=comes + lost(comes),
            gathered_bytes=coming.gathered,
            reductions=coming.reductions,
        )

    def _rooms(self, device: str, buckets: Sequence[Bucket]) -> int:
        """What a CPU worker lends its neighbours to exchange in what comes and goes: a room for each group of owners."""
        largest: dict[tuple[str, ...], int] = {}
        for bucket in buckets:
            owners = [self.cluster.device(owner) for owner in bucket.owners]
            alone = any(owner.backend != "cpu" for owner in owners) or len({owner.node for owner in owners}) > 1
            if device in bucket.owners and len(owners) > 1 and not alone:
                largest[bucket.owners] = max(largest.get(bucket.owners, 0), bucket.bytes)
        return sum(room_bytes(most, len(owners)) for owners, most in largest.items())

    def _with_arriving(
        self, at: Position, number: int, costs: StageCosts, arriving: Arriving, released: bool
    ) -> StageCosts:
        """With the gradients that come in its first backward, and what the last one adds."""
        if not arriving.first and not arriving.last:
            return costs
        ops, lost = at.stages[number].ops, self.device_memory[at.device].lost
        remade = {part.ops for part in parts_again(self.graph, ops, at.stages[number].recompute, ())}
        first, last = (by_block(self.graph, ops, of) for of in (arriving.first, arriving.last))
        most: dict[int, tuple[int, int]] = {}
        for size in set(at.sizes(number)):
            held = {part: float(self.kept_by(at, number, size, part)) for part, _ in first}
            kept = [0.0 if part in remade else own for part, own in held.items()]
            again = [own + self._beside(part, ops, size) if part in remade else 0.0 for part, own in held.items()]
            beside, space = self._beside_kept(at, number, size, released)
            own = [beside.get(part, 0.0) for part, _ in first]
            again = [a + b for a, b in zip(again, own, strict=True)]
            of_first = max(0.0, at_most(kept, [made for _, made in first], again) - space) if size else 0.0
            of_last = max(0.0, at_most(kept, [made for _, made in last], own) - space) if size else 0.0
            most[size] = round(of_first) + lost(of_first), round(of_last) + lost(of_last)
        made, summed = sum(arriving.first.values()), sum(arriving.last.values())
        now = self._made_in_first_half(ops, arriving.first)
        return replace(
            costs,
            made_bytes=round(made) + lost(made),
            input_made_bytes=round(now) + lost(now),
            first_bytes=tuple(most[size][0] for size in at.sizes(number)),
            summed_bytes=round(summed) + lost(summed),
            last_bytes=tuple(most[size][1] for size in at.sizes(number)),
        )

    def kept_by(self, at: Position, number: int, size: int, part: Ops) -> int:
        """Bytes that a part of a stage keeps from forward to backward."""
        if not size:
            return 0
        in_parts = self._kept_in_parts(at, number)
        return (self.device_memory[at.device] if in_parts is None else in_parts).activations(size, part)

    def _kept_in_parts(self, at: Position, number: int) -> KeptInParts | None:
        """Of a stage that lies in parts on its devices."""
        together = self.in_parts(at.pipeline, number, at.row(number))
        if together is None:
            return None
        member = at.stages[number].rows[at.row(number)].index(at.device)
        return KeptInParts(stage=together, member=member, memory=self.device_memory[at.device])

    def _beside_kept(self, at: Position, number: int, size: int, released: bool) -> tuple[dict[Ops, float], int]:
        """Where what comes and goes in a stage was told beside what was let go of: of each of its blocks by itself, and what was told."""
        kept = self._kept_in_parts(at, number)
        if kept is None or not size or not released or not kept.memory.tells_blocks:
            return {}, 0
        return dict(kept.passing(size, at.boxes)), kept.workspace(size, at.boxes)

    def _made_in_first_half(self, ops: Ops, gradients: Mapping[str, float]) -> float:
        """Those that no linear layer alone makes."""
        here = self.graph.ops[ops[0] : ops[1]]
        early = {name for op in here if not self._halves.waits(op) for name in op.parameters}
        return sum(size for name, size in gradients.items() if name in early)

    def shared_out(self, use: MemoryUse, plan: Plan, device: str, buckets: Sequence[Bucket], state: float) -> MemoryUse:
        """With what it shares with others: where gradients are sharded too, or parameters, it keeps that part of them."""
        if plan.zero == 1:
            return use if self.cluster.device(device).backend == "cpu" else use.with_sums(state)
        shared = [bucket for bucket in buckets if device in bucket.owners and len(bucket.owners) > 1]
        pipeline = next(p for p in plan.pipelines if any(device in stage.devices for stage in p.stages))
        mine = [n for n, stage in enumerate(pipeline.stages) if device in stage.devices]
        reads = stages_reading(pipeline, self.graph)
        readers = {b.index: [n for n in mine if not reads[n].isdisjoint(b.parameters)] for b in shared}
        place = pipeline.place_of_stage[mine[0]]
        whole = gathered(orders_of(plan.schedule, pipeline)[place], shared, readers)
        trained = sum(bucket.bytes for bucket in shared) if plan.zero > 2 else 0
        parameters = whole.parameters if plan.zero > 2 else 0
        again = any(pipeline.stages[number].recompute for number in mine)
        return use.shared_out(state, gradients=whole.gradients, parameters=parameters, trained=trained, again=again)

    def _stage_of(
        self, at: Position, number: int, entering: Size, leaving: Size, arriving: bool, released: bool
    ) -> tuple[StageCosts, int]:
        """The costs of a stage on one of its devices, and what comes and goes inside its passes. ``released``: the backward of an op lets
        go of all that it has kept."""
        stage, memory, sizes = at.pipeline.stages[number], self.device_memory[at.device], at.sizes(number)
        largest = max(sizes, default=0)
        kept = self._kept_in_parts(at, number)
        if kept is None:
            costs = self.stage(
                at.device,
                stage.ops,
                sizes,
                recompute=stage.recompute,
                keep=stage.keep,
                entering=entering,
                leaving=leaving,
            )
            return costs, memory.workspace(largest, stage.ops, again=arriving or bool(stage.recompute))
        costs = member_costs(
            kept,
            sizes,
            [count for _, count in at.taken[number][at.device]],
            again=parts_again(self.graph, stage.ops, stage.recompute, stage.keep),
            entering=entering,
            leaving=leaving,
            ranks=tuple(map(self.cluster.rank, stage.rows[at.row(number)])),
        )
        return costs, kept.workspace(largest, at.boxes, released=released) if largest else 0

    def _on_host(self, at: Position, number: int, costs: StageCosts) -> tuple[StageCosts, int]:
        """A stage with activations on the host, and what of them comes and goes on the device."""
        memory = self.device_memory[at.device]
        s_per_byte = self.host_copy_s_per_byte(at.device)
        cuts = self._pieces_of(at.pipeline.stages[number])
        together = self.in_parts(at.pipeline, number, at.row(number))
        row = at.pipeline.stages[number].rows[at.row(number)]

        def seconds(kind: Pass, ops: Ops, size: int) -> float:
            if together is not None:
                return together.together_s(kind, size, ops)[0]
            return self.compute[at.device].seconds(kind, ops, size)

        def held(ops: Ops, size: int) -> int:
            if together is None:
                return memory.activations(size, ops)
            return KeptInParts(stage=together, member=row.index(at.device), memory=memory).activations(size, ops)

        def parts(size: int) -> list[Part]:
            made = []
            for ops, away in cuts:
                size_bytes = held(ops, size) if away else 0
                made.append(
                    Part(
                        forward_s=seconds("F", ops, size),
                        backward_s=seconds("B", ops, size),
                        copied_s=size_bytes * s_per_byte,
                        bytes=size_bytes,
                    )
                )
            return made

        return on_host(costs, at.sizes(number), parts, memory.lost)

    def host_copy_s_per_byte(self, device: str) -> float:
        """Seconds in which a byte goes to the host of a device, or comes back. Raises MeasureError where that was not measured."""
        measured = self.measured(device)
        if self.cluster.device(device).backend == "cpu":  # a copy in its own memory
            return measured.optimizer_s_per_byte * 2 / self.recipe.update_passes
        if not measured.host_copy_s_per_byte:
            raise MeasureError(f"what copies between {device} and its host take was not measured; measure again")
        return measured.host_copy_s_per_byte

    def _pieces_of(self, stage: Stage) -> list[tuple[Ops, bool]]:
        """Blocks of a stage whose activations are on the host, and what lies between them."""
        pieces, reached = [], stage.ops[0]
        for block in map(self.graph.blocks.__getitem__, sorted(stage.offload_activations)):
            if reached < block.start:
                pieces.append(((reached, block.start), False))
            pieces.append(((block.start, block.stop), True))
            reached = block.stop
        if reached < stage.ops[1]:
            pieces.append(((reached, stage.ops[1]), False))
        return pieces

    def _ready(self, at: Position, bucket: Bucket) -> tuple[tuple[int, float], ...]:
        """The stages that complete a bucket, each with the fraction of its last backward; all of them for what no op reads."""
        names = set(bucket.parameters)
        ready = []
        for number, stage in at.stages.items():
            sizes = at.sizes(number)
            if not any(sizes):
                continue
            if not bucket.blocks:
                ready.append((number, 1.0))
            elif not names.isdisjoint(self._read_in(stage.ops)):
                first = next(block.index for block in self.graph.blocks if block.stop > stage.ops[0])
                block = self.graph.blocks[bucket.ready_block(first)]
                size = next(size for size in reversed(sizes) if size)
                together = self.in_parts(at.pipeline, number, at.row(number))
                fraction = (
                    self.compute[at.device].ready_fraction(block.start, stage.ops, size)
                    if together is None
                    else together.ready_fraction(block.start, size)
                )
                ready.append((number, fraction))
        return tuple(ready)


def _under_way(travel: Sequence[Route], rank: int) -> int:
    """Room is made for messages ahead of each rank that sends any, and what is sent stays until it has left."""
    largest: dict[tuple[int, int], int] = {}
    for route in travel:
        ends = route.source[0], route.destination[0]
        if rank in ends:
            largest[ends] = max(largest.get(ends, 0), *route.bytes)
    return MESSAGES_AHEAD * sum(largest.values())


def _held(stages: Sequence[Ops] | None, boxes: Boxes) -> _Held:
    return None if stages is None else tuple(stages), frozenset(boxes.items())
