"""The cost of everything that one rank does in a step of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from heterodyne.cost.activation_offload import Part, on_host
from heterodyne.cost.compute import Pass
from heterodyne.cost.member import member_costs
from heterodyne.cost.position import Position
from heterodyne.cost.recomputation import parts_again
from heterodyne.cost.routes import Route
from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts
from heterodyne.cost.step_transients import GradientBuildUp, StepTransients, by_block
from heterodyne.graph.cut import Crossing
from heterodyne.graph.size import Size
from heterodyne.plan.buckets import Bucket, room_bytes
from heterodyne.plan.order import is_asynchronous, orders_of
from heterodyne.plan.plan import Plan, Stage
from heterodyne.plan.schedules import SCHEDULES
from heterodyne.plan.schedules.asynchronous import depth_of, predicted_versions
from heterodyne.plan.traffic import MESSAGES_AHEAD

if TYPE_CHECKING:
    from heterodyne.cost.model import CostModel

__all__ = ["RankStep"]

Ops = tuple[int, int]
_PREDICTING = 4  # copies of the largest parameter that come and go while weights are predicted


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """The step of one rank. ``state``: the fraction of the optimizer state of its weights that it keeps and updates."""

    model: CostModel
    at: Position
    plan: Plan
    buckets: Sequence[Bucket]
    state: float

    def costs(self, crossing: Sequence[Crossing], travel: Sequence[Route]) -> RankCosts:
        """``crossing``: the values that cross between stages; ``travel``: the messages between ranks."""
        model, at, plan, buckets, state = self.model, self.at, self.plan, self.buckets, self.state
        device, mine = at.device, at.stages
        rank, measured = model.cluster.rank(device), model.measured(device)
        costs, workspace, holes = {}, 0, 0
        transients = StepTransients.of(model, at, buckets, state, plan)
        halved = any("W" in row for row in at.pipeline.order) or SCHEDULES[plan.schedule].halves
        for number in mine:
            # What a stage of the same rank has made is there already.
            into = Size.total(c.bytes for c in crossing if number in c.consumers and c.producer not in mine)
            out = Size.total(c.bytes for c in crossing if c.producer == number)
            build_up = transients.of_stage(number)
            # Halves of backwards keep some of it; of what is made again, shared out or on hosts there are other accounts.
            released = not (halved or plan.zero > 1 or mine[number].recompute or mine[number].offload_activations)
            stage, needed = self._stage_of(number, into, out, bool(build_up.first or build_up.last), released)
            costs[number] = self._with_build_up(number, stage, build_up, released)
            if mine[number].offload_activations:
                costs[number], passing = self._on_host(number, costs[number])
                needed += passing
            workspace = max(workspace, needed)
            holes = max(holes, model.device_memory[device].holes(max(at.sizes(number), default=0), mine[number].ops))
        ranges = tuple(stage.ops for stage in mine.values())
        on_host = any(stage.offload for stage in mine.values())
        alone = model.memory_use(device, 0, ranges, at.boxes).with_state(0 if on_host else state)
        summed_apart = plan.zero == 1 and model.cluster.device(device).backend != "cpu"
        carried = self._carried_s(ranges) if plan.zero in (1, 2) else 0.0
        versions = self._predicted_versions()
        predicted_s = model.recipe.prediction_to_step * model.update_s(device, ranges, at.boxes) if versions else 0.0
        lost = model.device_memory[device].lost
        elsewhere = round((1 - state) * transients.trained) if plan.zero > 2 else 0
        comes = alone.gradients + elsewhere if plan.zero > 1 else transients.alone
        # What is lost beside tensors is lost beside shards of them in proportion.
        shards = elsewhere + round((1 - state) * alone.gradients) if plan.zero > 1 else 0
        beside = round(alone.lost * shards / max(1, alone.tensors)) + lost(comes - shards)
        return RankCosts(
            stages=costs,
            ready={bucket.index: self._ready(bucket) for bucket in buckets if device in bucket.owners},
            clip_s=state * model.clip_s(device, ranges, at.boxes),
            step_s=state * model.update_s(device, ranges, at.boxes, on_host=on_host) + carried + predicted_s,
            overhead_s=measured.step_overhead_s,
            overlap=min(1.0, max(0.0, measured.overlap)),
            fixed_bytes=alone.fixed
            + (self._rooms() if plan.zero > 1 else 0)
            + (versions * alone.gradients + _PREDICTING * alone.update if versions else 0),
            workspace_bytes=_under_way(travel, rank) + workspace,
            holes_bytes=holes,
            update_bytes=max(alone.update, round(state * alone.gradients) if summed_apart else 0),
            coming_bytes=comes + beside,
            gathered_bytes=transients.gathered,
            reductions=transients.reductions,
        )

    def _workspace_beside(self, number: int, size: int, released: bool) -> tuple[dict[Ops, float], int]:
        """The workspace of each block of a sharded stage, where that was counted beside activations already freed; and what was counted."""
        kept = self.model.sharded_activations(self.at, number)
        if kept is None or not size or not released or not kept.memory.tells_blocks:
            return {}, 0
        return dict(kept.passing(size, self.at.boxes)), kept.workspace(size, self.at.boxes)

    def _predicted_versions(self) -> int:
        """Return how many predicted versions of its weights the rank holds at a time."""
        if not is_asynchronous(self.plan):
            return 0
        place = self.at.pipeline.places.index(next(iter(self.at.stages.values())).devices)
        depth = depth_of(orders_of(self.plan.schedule, self.at.pipeline)[place])
        return predicted_versions(depth, len(self.at.pipeline.micro_batches))

    def _rooms(self) -> int:
        """Bytes of the shared memory in which a CPU worker exchanges shards with its neighbours, for each group of owners."""
        largest: dict[tuple[str, ...], int] = {}
        for bucket in self.buckets:
            owners = [self.model.cluster.device(owner) for owner in bucket.owners]
            alone = any(owner.backend != "cpu" for owner in owners) or len({owner.node for owner in owners}) > 1
            if self.at.device in bucket.owners and len(owners) > 1 and not alone:
                largest[bucket.owners] = max(largest.get(bucket.owners, 0), bucket.bytes)
        return sum(room_bytes(most, len(owners)) for owners, most in largest.items())

    def _with_build_up(self, number: int, costs: StageCosts, build_up: GradientBuildUp, released: bool) -> StageCosts:
        """With the gradients that its first backward allocates, and what the last one adds."""
        model, at = self.model, self.at
        if not build_up.first and not build_up.last:
            return costs
        ops, lost = at.stages[number].ops, model.device_memory[at.device].lost
        remade = {part.ops for part in parts_again(model.graph, ops, at.stages[number].recompute, ())}
        first, last = (by_block(model.graph, ops, of) for of in (build_up.first, build_up.last))
        most: dict[int, tuple[int, int]] = {}
        for size in set(at.sizes(number)):
            held = {part: float(model.kept_by(at, number, size, part)) for part, _ in first}
            kept = [0.0 if part in remade else own for part, own in held.items()]
            again = [
                own + model.passes.beside(part, ops, size) if part in remade else 0.0 for part, own in held.items()
            ]
            beside, space = self._workspace_beside(number, size, released)
            own = [beside.get(part, 0.0) for part, _ in first]
            again = [a + b for a, b in zip(again, own, strict=True)]
            of_first = max(0.0, _at_most(kept, [made for _, made in first], again) - space) if size else 0.0
            of_last = max(0.0, _at_most(kept, [made for _, made in last], own) - space) if size else 0.0
            most[size] = round(of_first) + lost(of_first), round(of_last) + lost(of_last)
        made, summed = sum(build_up.first.values()), sum(build_up.last.values())
        now = model.passes.made_in_first_half(ops, build_up.first)
        return replace(
            costs,
            made_bytes=round(made) + lost(made),
            input_made_bytes=round(now) + lost(now),
            first_bytes=tuple(most[size][0] for size in at.sizes(number)),
            summed_bytes=round(summed) + lost(summed),
            last_bytes=tuple(most[size][1] for size in at.sizes(number)),
        )

    def _stage_of(
        self, number: int, entering: Size, leaving: Size, builds_up: bool, released: bool
    ) -> tuple[StageCosts, int]:
        """The cost of a stage on one of its devices, and the transient bytes inside its passes. ``released``: the backward of an op frees
        all that it has saved.
        """
        model, at = self.model, self.at
        stage, memory, sizes = at.pipeline.stages[number], model.device_memory[at.device], at.sizes(number)
        largest = max(sizes, default=0)
        kept = model.sharded_activations(at, number)
        if kept is None:
            costs = model.passes.of(
                at.device,
                stage.ops,
                sizes,
                recompute=stage.recompute,
                keep=stage.keep,
                entering=entering,
                leaving=leaving,
            )
            return costs, memory.workspace(largest, stage.ops, again=builds_up or bool(stage.recompute))
        costs = member_costs(
            kept,
            sizes,
            [count for _, count in at.taken[number][at.device]],
            again=parts_again(model.graph, stage.ops, stage.recompute, stage.keep),
            entering=entering,
            leaving=leaving,
            ranks=tuple(map(model.cluster.rank, stage.rows[at.row(number)])),
        )
        return costs, kept.workspace(largest, at.boxes, released=released) if largest else 0

    def _on_host(self, number: int, costs: StageCosts) -> tuple[StageCosts, int]:
        """The stage with activations offloaded, and their peak bytes on the device."""
        model, at = self.model, self.at
        s_per_byte = model.host_copy_s_per_byte(at.device)
        cuts = self._pieces_of(at.pipeline.stages[number])
        together = model.sharded_stage(at.pipeline, number, at.row(number))

        def seconds(kind: Pass, ops: Ops, size: int) -> float:
            if together is not None:
                return together.together_s(kind, size, ops)[0]
            return model.compute[at.device].seconds(kind, ops, size)

        def parts(size: int) -> list[Part]:
            made = []
            for ops, away in cuts:
                size_bytes = model.kept_by(at, number, size, ops) if away else 0
                made.append(
                    Part(
                        forward_s=seconds("F", ops, size),
                        backward_s=seconds("B", ops, size),
                        copied_s=size_bytes * s_per_byte,
                        bytes=size_bytes,
                    )
                )
            return made

        return on_host(costs, at.sizes(number), parts, model.device_memory[at.device].lost)

    def _pieces_of(self, stage: Stage) -> list[tuple[Ops, bool]]:
        """The op ranges of a stage, each with whether its activations are offloaded."""
        pieces, reached = [], stage.ops[0]
        for block in map(self.model.graph.blocks.__getitem__, sorted(stage.offload_activations)):
            if reached < block.start:
                pieces.append(((reached, block.start), False))
            pieces.append(((block.start, block.stop), True))
            reached = block.stop
        if reached < stage.ops[1]:
            pieces.append(((reached, stage.ops[1]), False))
        return pieces

    def _ready(self, bucket: Bucket) -> tuple[tuple[int, float], ...]:
        """The stages that complete a bucket, each with the fraction of its last backward; all of them for what no op reads."""
        model, at = self.model, self.at
        names = set(bucket.parameters)
        ready = []
        for number, stage in at.stages.items():
            sizes = at.sizes(number)
            if not any(sizes):
                continue
            if not bucket.blocks:
                ready.append((number, 1.0))
            elif not names.isdisjoint(model.passes.read_in(stage.ops)):
                first = next(block.index for block in model.graph.blocks if block.stop > stage.ops[0])
                block = model.graph.blocks[bucket.ready_block(first)]
                size = next(size for size in reversed(sizes) if size)
                together = model.sharded_stage(at.pipeline, number, at.row(number))
                fraction = (
                    model.compute[at.device].ready_fraction(block.start, stage.ops, size)
                    if together is None
                    else together.ready_fraction(block.start, size)
                )
                ready.append((number, fraction))
        return tuple(ready)

    def _carried_s(self, stages: Sequence[Ops]) -> float:
        """Seconds of the copies that carry new weights where state is shared out: the own ones into the buffer, then all out of it."""
        return (
            2
            / self.model.recipe.update_passes
            * (self.state + 1)
            * self.model.update_s(self.at.device, stages, self.at.boxes)
        )


def _under_way(travel: Sequence[Route], rank: int) -> int:
    """Bytes of receive buffers for messages ahead of each sending rank, and of sends in flight."""
    largest: dict[tuple[int, int], int] = {}
    for route in travel:
        ends = route.source[0], route.destination[0]
        if rank in ends:
            largest[ends] = max(largest.get(ends, 0), *route.bytes)
    return MESSAGES_AHEAD * sum(largest.values())


def _at_most(kept: Sequence[float], made: Sequence[float], again: Sequence[float]) -> float:
    """Peak bytes above the start, over blocks in order: ``kept`` is freed, ``made`` is allocated, ``again`` exists only meanwhile."""
    most = now = 0.0
    for goes, comes, meanwhile in zip(kept, made, again, strict=True):
        most = max(most, now + meanwhile)
        now += comes - goes
        most = max(most, now)
    return most
