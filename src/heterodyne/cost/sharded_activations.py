"""Bytes of saved activations and workspace on a member of a sharded stage, op by op.

What an op saves shrinks with its inputs. Copies that a conversion makes of what is saved already are not counted: with them peaks of
stages in tensor parallelism were told 5% too high (`benchmarks/memory_truth.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from heterodyne.cost.exchange import buffer_bytes
from heterodyne.cost.memory import DeviceMemory
from heterodyne.cost.op_shares import Layouts
from heterodyne.cost.recomputation import RecomputedPart
from heterodyne.cost.sharded_stage import ShardedStageCost
from heterodyne.cost.stage_collectives import exchanges_of
from heterodyne.graph.cut import computed_again
from heterodyne.graph.ir import Op, Ref
from heterodyne.plan.boxes import Box

__all__ = ["ShardedActivations"]

Ops = tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedActivations:
    """``member``: its index among the devices of the stage; ``memory``: of that device."""

    stage: ShardedStageCost
    member: int
    memory: DeviceMemory

    def activations(self, samples: int, ops: Ops | None = None) -> int:
        """Bytes saved from forward to backward of a micro-batch, by the stage or by some of its ops."""
        parts = self.stage.parts(samples)
        of = ops or self.stage.ops
        kept = {op.name: parts.of_op(op).kept[self.member] for op in self._in(of)}
        return self.memory.activations(samples, of, kept)

    def read_from_before(self, samples: int, ops: Ops) -> float:
        """Inputs of some ops of the stage from ops before them: saved where these are recomputed."""
        graph = self.stage.graph
        made = graph.op_by_name.keys() - computed_again(graph) - {op.name for op in self._in(ops)}
        read = {ref for op in self._in(ops) for ref in op.operands if ref.name in made}
        parts = self.stage.parts(samples)
        return sum(self._own(ref, parts.lies(ref), samples) for ref in read)

    def made_by(self, samples: int, again: RecomputedPart) -> float:
        """Outputs that ops of a recomputed part keep."""
        parts = self.stage.parts(samples)
        return again.kept_bytes(self.stage.graph, samples, 0.0, lambda op: parts.of_op(op).written[self.member])

    def between_halves(self, samples: int) -> float:
        """What W needs: inputs of linear layers, and the gradients of their outputs."""
        graph, (start, stop) = self.stage.graph, self.stage.ops
        parts = self.stage.parts(samples)
        entering: set[tuple[Ref, Layouts]] = set()
        leaving: set[tuple[Ref, Layouts]] = set()
        for op in graph.ops[start:stop]:
            if self.stage.halves.waits(op):
                entering.update(tensor for tensor in parts.read_by(op) if tensor[0].name not in graph.given)
                leaving.update(parts.made_by(op))
        return sum(self._own(ref, layouts, samples) for ref, layouts in (*entering, *leaving))

    def workspace(self, samples: int, boxes: Mapping[str, Box], *, released: bool = True) -> int:
        """Transient bytes of a pass, on top of all that it saves of a micro-batch. ``boxes``: of its parameters.

        A forward has saved only what the ops before have made, and a backward has freed what those behind have saved, unless not all of
        that is ``released``.
        """
        backward = self.passing(samples, boxes)
        start, stop = self.stage.ops
        # What the stage makes again for itself of what lies before it comes at its begin.
        line = [(max(start, place), of.forward) for place, of in self.stage.line(samples)]
        forward = [(place, buffer_bytes(each)) for place, sent in line for each in sent]
        along = [0.0] * (1 + stop - start)  # on top of what all ops keep
        if released:
            parts, kept = self.stage.parts(samples), self.activations(samples)
            by_op = (op.bytes_saved(samples) * parts.of_op(op).kept[self.member] for op in self._in((start, stop)))
            sums = list(accumulate(by_op, initial=0.0))
            along = [kept * (each / sums[-1] - 1) if sums[-1] > 0 else 0.0 for each in sums]
        moments = [along[last - start] + size for (_, last), size in backward]
        moments += [along[place - start] + size for place, size in forward]
        return round(max(0.0, *moments))

    def passing(self, samples: int, boxes: Mapping[str, Box]) -> list[tuple[Ops, float]]:
        """Of the parts of the stage that its blocks are: what comes and goes inside of the backward of each, and of its largest exchange.
        Where nothing is known of blocks, the stage is one part."""
        start, stop = self.stage.ops
        blocks = [(max(start, b.start), min(stop, b.stop)) for b in self.stage.graph.blocks]
        blocks = [each for each in blocks if each[0] < each[1]] if self.memory.tells_blocks else [(start, stop)]
        exchanged = [(max(start, place), size) for place, size in self._exchanged(samples)]
        moved = self._moved(samples)
        waiting = self.memory.gradients_that_wait((start, stop), boxes)
        return [
            (
                part,
                (waiting if part[1] < stop else 0)  # the last part has it in what was measured of it
                + self.memory.workspace(samples, part, moved, boxes=boxes)
                + max((size for place, size in exchanged if part[0] <= place < part[1]), default=0.0),
            )
            for part in blocks
        ]

    def _moved(self, samples: int) -> dict[str, float]:
        """What each op reads and writes here."""
        parts = self.stage.parts(samples)
        of = {op: parts.of_op(op) for op in self._in(self.stage.ops)}
        return {
            op.name: op.bytes_read(samples) * own.read[self.member]
            + op.bytes_written(samples) * own.written[self.member]
            for op, own in of.items()
        }

    def _exchanged(self, samples: int) -> Iterator[tuple[int, float]]:
        """The places of the ops at which members meet, with what that takes on the way back: buffers, and of what is laid out otherwise the
        gradient both ways that it lies."""
        for place, meeting in self.stage.line(samples):
            yield place, max(map(buffer_bytes, meeting.backward), default=0.0)
        parts, places = self.stage.parts(samples), {op.name: n for n, op in enumerate(self.stage.graph.ops)}
        for axis, exchange in exchanges_of(parts):
            have = list(parts.lies(exchange.tensor))
            want = [*have[:axis], exchange.want, *have[axis + 1 :]]
            both = sum(self._own(exchange.tensor, tuple(layouts), samples) for layouts in (have, want))
            yield places.get(exchange.before or exchange.tensor.name, 0), both

    def _own(self, ref: Ref, layouts: Layouts, samples: int) -> float:
        """Bytes of what this member has of a tensor."""
        parts = self.stage.parts(samples)
        return parts.bytes_of(ref) * parts.of_tensor(ref, *layouts)[self.member]

    def _in(self, ops: Ops) -> tuple[Op, ...]:
        return self.stage.graph.ops[ops[0] : ops[1]]
