"""The time of a sharded stage (tensor, context or expert parallelism): what its devices take together for its passes.

All members run the same ops, each with its shard, and communicate where tensors are converted. The seconds of a block on a member are
those measured for as many samples as its share of the work would be: overheads that do not depend on size are not saved by sharding.
Inside a block they are divided by FLOPs and memory traffic (`balance`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.cost.backward_split import BackwardSplit
from heterodyne.cost.compute import Compute, Pass
from heterodyne.cost.exchange import Round, Wires
from heterodyne.cost.joint_time import joint_s
from heterodyne.cost.op_shares import Fractions, StageShares
from heterodyne.cost.overlap import Crossing, OverlapStep, overlapped_s
from heterodyne.cost.stage_collectives import StageCollective, conversion, exchanges_of, within
from heterodyne.graph.cut import stage_ops
from heterodyne.graph.ir import Block, ModelGraph, Op
from heterodyne.graph.sharding import REPLICATE, Exchange, Sharding
from heterodyne.graph.sharding.dealing import halved
from heterodyne.graph.sharding.layout import conversion as steps_between

__all__ = ["ShardedStageCost"]

Ops = tuple[int, int]
_TRAFFIC = {"F": 1, "B": 2, "I": 2, "W": 0}
"""Each tensor of the forward comes once more in the backward, and its gradient with it; W finds what it needs where I was."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedStageCost:
    """The stage on its members.

    Args:
        ops: ``[start, stop)``.
        sharding: the layout of its tensors on the members.
        compute: of each member.
        balance: FLOPs per byte of each member.
        wires: between them.
        halves: the split of the backward of each op.
        overlap: micro-batches run as two halves whose collectives overlap with computing.
        nodes: that of each member, where the all-to-alls of experts are hierarchical.
    """

    ops: Ops
    sharding: Sharding
    compute: tuple[Compute, ...]
    balance: tuple[float, ...]
    wires: Wires
    halves: BackwardSplit
    overlap: bool = False
    nodes: tuple[str, ...] = ()
    _parts: dict[int, StageShares] = field(default_factory=dict, repr=False)
    _lines: dict[tuple[int, Ops], tuple[tuple[int, StageCollective | None], ...]] = field(
        default_factory=dict, repr=False
    )
    _seconds: dict[tuple[Pass, int, Ops], dict[int, Fractions]] = field(default_factory=dict, repr=False)
    _joint: dict[tuple[Pass, int, Ops | None], tuple[float, float]] = field(default_factory=dict, repr=False)
    _of_alike: dict[tuple[object, Pass, int], tuple[Fractions, ...]] = field(default_factory=dict, repr=False)
    _sent: dict[tuple[Round, ...], Crossing] = field(default_factory=dict, repr=False)

    @property
    def graph(self) -> ModelGraph:
        return self.sharding.graph

    def parts(self, samples: int) -> StageShares:
        """Shares of each op for micro-batches of so many samples."""
        if samples not in self._parts:
            self._parts[samples] = StageShares(sharding=self.sharding, samples=samples, nodes=self.nodes)
        return self._parts[samples]

    def together_s(self, kind: Pass, samples: int, ops: Ops | None = None) -> tuple[float, float]:
        """Seconds of a pass from the moment at which all members begin until all are done, and those of them in collectives.

        ``ops``: only of a part of the stage.
        """
        key = (kind, samples, ops)
        if key not in self._joint:
            halves = [list(self._steps(kind, size, ops)) for size in self._run_as(samples)]
            if len(halves) > 1:
                borders_s = 0.0 if kind == "W" or ops not in (None, self.ops) else self._borders_s(samples)
                whole_s, exchanged_s = self._in_turns_s(halves)
                self._joint[key] = whole_s + borders_s, exchanged_s + borders_s
            else:
                self._joint[key] = _one_after_the_other_s(halves[0])
        return self._joint[key]

    def _in_turns_s(self, halves: Sequence[Sequence[OverlapStep]]) -> tuple[float, float]:
        """Only exposed collectives count."""
        whole_s = overlapped_s(halves, len(self.compute))
        return whole_s, whole_s - joint_s(step for steps in halves for step in steps if isinstance(step, tuple))

    def _borders_s(self, samples: int) -> float:
        """Seconds of the conversions at the boundaries of the stage: halves divide its samples differently from the whole, so activations
        are gathered (`frontend.in_turns`), and so are their gradients.
        """
        parts, made = self.parts(samples), {op.name for op in self._run}
        sent: list[Round] = []
        for axis, own in enumerate(self.sharding.axes):
            received = {
                ref: layout
                for ref, layout in own.layouts.items()
                if ref.name in self.graph.op_by_name and ref.name not in made
            }
            for ref, layout in {**received, **own.wanted}.items():
                if layout.kind == "shard":
                    joined = Exchange(
                        before=None,
                        tensor=ref,
                        have=layout,
                        want=REPLICATE,
                        steps=steps_between(layout, REPLICATE, differentiable=False),
                        bytes=self.graph.spec(ref).bytes,
                    )
                    sent += conversion(axis, joined, parts).forward
        return self._exchange_s(tuple(sent)).waited_s if sent else 0.0

    def alone_s(self, member: int, kind: Pass, samples: int, ops: Ops | None = None) -> float:
        """Compute seconds of one member in a pass. ``ops``: only of a part of the stage."""
        start, stop = ops or self.ops
        return sum(
            own[member]
            for size in self._run_as(samples)
            for place, own in self._of_ops(kind, size, (start, stop)).items()
            if start <= place < stop
        )

    def _run_as(self, samples: int) -> tuple[int, ...]:
        """The sizes of the parts in which a micro-batch runs."""
        return halved(samples) if self.overlap else (samples,)

    def ready_fraction(self, position: int, samples: int) -> float:
        """The fraction of the backward after which that of the ops from ``position`` on is done."""
        whole, _ = self.together_s("B", samples)
        behind, _ = self.together_s("B", samples, (max(position, self.ops[0]), self.ops[1]))
        return min(1.0, behind / whole) if whole > 0 else 1.0

    def line(self, samples: int) -> Iterator[tuple[int, StageCollective]]:
        """All collectives of a forward and a backward, in the order of the forward, each with the place of the op it belongs to."""
        return ((place, meeting) for place, meeting in self._line(samples, self.ops) if meeting is not None)

    def _steps(self, kind: Pass, samples: int, ops: Ops | None) -> Iterator[OverlapStep]:
        part = ops or self.ops
        line, seconds = self._line(samples, part), self._of_ops(kind, samples, part)
        for place, meeting in line if kind == "F" else reversed(line):
            if meeting is None:
                if place in seconds:
                    yield seconds[place]
            elif sent := () if kind == "W" else meeting.forward if kind == "F" else meeting.backward:
                crossing = self._exchange_s(sent)
                yield crossing.waited_s if meeting.inside else crossing

    def _exchange_s(self, sent: tuple[Round, ...]) -> Crossing:
        if sent not in self._sent:
            self._sent[sent] = Crossing(*self.wires.divided(sent))
        return self._sent[sent]

    def _line(self, samples: int, ops: Ops) -> tuple[tuple[int, StageCollective | None], ...]:
        """The forward of a part of the stage, in order: ``(index of the op, None)`` and collectives with the index of the op they belong
        to.
        """
        key = (samples, ops)
        if key not in self._lines:
            self._lines[key] = (
                tuple(self._in_order(self.parts(samples)))
                if ops == self.ops
                else tuple(step for step in self._line(samples, self.ops) if ops[0] <= step[0] < ops[1])
            )
        return self._lines[key]

    def _in_order(self, parts: StageShares) -> Iterator[tuple[int, StageCollective | None]]:
        for op in self._run:
            place = self._places[op.name]
            yield from ((place, conversion(*ahead, parts)) for ahead in self._ahead.get(op.name, ()))
            yield place, None
            inside = within(op, parts)
            if inside is not None:
                yield place, inside
        # What leaves the stage is laid out by the part of it that makes it.
        for axis, exchange in self._ahead.get(None, ()):
            yield self._places.get(exchange.tensor.name, self.ops[0]), conversion(axis, exchange, parts)

    @cached_property
    def _ahead(self) -> dict[str | None, list[tuple[int, Exchange]]]:
        """The conversions of the stage, each with its mesh axis, by the op that they precede, in the order of its forward."""
        found: dict[str | None, list[tuple[int, Exchange]]] = {}
        for axis, exchange in exchanges_of(self.parts(1)):
            found.setdefault(exchange.before, []).append((axis, exchange))
        return found

    def _of_ops(self, kind: Pass, samples: int, ops: Ops) -> dict[int, Fractions]:
        """Seconds of each op on each member, by index: of all blocks of which a part of the stage has any."""
        key = (kind, samples, ops)
        if key not in self._seconds:
            self._seconds[key] = {}
            for block in self.graph.blocks:
                low, high = max(block.start, self.ops[0]), min(block.stop, self.ops[1])
                if low < high and max(low, ops[0]) < min(high, ops[1]):
                    alike = (self._signature(block, low, high), kind, samples)
                    if alike not in self._of_alike:
                        members = range(len(self.compute))
                        columns = [self._of_member(place, kind, (low, high), samples) for place in members]
                        self._of_alike[alike] = tuple(zip(*columns, strict=True))
                    self._seconds[key].update(zip(range(low, high), self._of_alike[alike], strict=True))
        return self._seconds[key]

    def _signature(self, block: Block, low: int, high: int) -> object:
        """Equal for parts of blocks that are alike and laid out alike: they take as long."""
        strategies = tuple(
            axis.strategies.get(op.name) for axis in self.sharding.axes for op in self.graph.ops[low:high]
        )
        return block.kind, low - block.start, high - block.start, strategies

    def _of_member(self, member: int, kind: Pass, ops: Ops, samples: int) -> Sequence[float]:
        """Seconds of ops of one block."""
        works = [self._work(member, kind, place, samples) for place in range(*ops)]
        whole, own = sum(all_of_it for all_of_it, _ in works), sum(part for _, part in works)
        if whole <= 0:  # nothing is known of how they compare
            works = [(1.0, 1.0)] * len(works)
            whole = own = float(len(works))
        seconds = self.compute[member].seconds(kind, ops, samples * own / whole)
        return [seconds * part / own if own > 0 else 0.0 for _, part in works]

    def _work(self, member: int, kind: Pass, place: int, samples: int) -> tuple[float, float]:
        """FLOPs of an op, and of its share on a member, or the equivalent of its memory traffic."""
        op = self.graph.ops[place]
        if kind in ("I", "W"):
            flops = (self.halves.input_flops if kind == "I" else self.halves.weight_flops)[place](samples)
        else:
            flops = (op.flops_forward if kind == "F" else op.flops_backward)(samples)
        parts = self.parts(samples).of_op(op)
        read, written = (
            _TRAFFIC[kind] * self.balance[member] * size(samples) for size in (op.bytes_read, op.bytes_written)
        )
        return max(flops, read + written), max(
            flops * parts.operations[member], read * parts.read[member] + written * parts.written[member]
        )

    @cached_property
    def _run(self) -> tuple[Op, ...]:
        """Its ops with those that the stage recomputes for itself, which cost next to nothing."""
        return stage_ops(self.graph, *self.ops)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {op.name: place for place, op in enumerate(self.graph.ops)}


def _one_after_the_other_s(steps: Sequence[OverlapStep]) -> tuple[float, float]:
    waited_for = [step.waited_s if isinstance(step, Crossing) else step for step in steps]
    return joint_s(waited_for), sum(step for step in waited_for if not isinstance(step, tuple))
