"""Seconds and bytes of the passes of a stage that one device has whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from heterodyne.cluster.catalog import find
from heterodyne.cluster.spec import Cluster, Device
from heterodyne.cost.backward_split import BackwardSplit
from heterodyne.cost.compute import Compute, Pass
from heterodyne.cost.memory import DeviceMemory
from heterodyne.cost.recipe import Recipe
from heterodyne.cost.recomputation import RecomputedPart, parts_again
from heterodyne.cost.stage import StageCosts
from heterodyne.graph.cut import crossings
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.size import ZERO, Size
from heterodyne.plan.precision import Precision, precision_of

__all__ = ["StagePasses"]

Ops = tuple[int, int]
_OF_CPU: Final = 8.0
"""FLOPs per byte. A core with AVX2 or AVX-512 does 50 to 200 GFLOP/s in fp32, and has 10 to 20 GB/s of memory bandwidth."""
_OF_OTHERS: Final = 60.0
_PEAKS: Final = {"fp32": ("fp32", "tf32"), "bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "bf16", "fp32")}


class _OfMicroBatch(NamedTuple):
    """What `StageCosts` has for each micro-batch, by the names of its fields; of none nothing."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    halved_forward_s: float = 0.0
    recompute_s: float = 0.0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    redone_bytes: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StagePasses:
    """Passes of stages of one model on the devices of a cluster, cached. ``compute``, ``memory``: by device."""

    graph: ModelGraph
    cluster: Cluster
    recipe: Recipe
    compute: Mapping[str, Compute]
    memory: Mapping[str, DeviceMemory]
    halves: BackwardSplit
    _entering: dict[tuple[int, int, int], Size] = field(default_factory=dict, init=False, repr=False, compare=False)
    _reads: dict[Ops, frozenset[str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _redone: dict[tuple[str, RecomputedPart, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def of(
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
        columns: dict[str, Any] = {
            name: tuple(getattr(made[size], name) for size in sizes) for name in _OfMicroBatch._fields
        }
        return StageCosts(**columns)

    def _passes(
        self,
        device: str,
        ops: Ops,
        size: int,
        again: Sequence[RecomputedPart],
        entering: Size,
        leaving: Size,
        since: int,
    ) -> _OfMicroBatch:
        """``since``: the op from which on what is read again counts as kept for that."""
        compute, memory = self.compute[device], self.memory[device]

        def seconds(kind: Pass, part: Ops) -> float:
            return compute.seconds(kind, part, size)

        def with_loss(tensors: float) -> int:
            return round(tensors) + memory.lost(tensors)

        if size == 0:
            return _OfMicroBatch()
        dropped = [memory.activations(size, part.ops) for part in again]
        inputs = sum(self._read_by(part.ops, since)(size) for part in again)
        inputs += sum(a.kept_bytes(self.graph, size, saved) for a, saved in zip(again, dropped, strict=True))
        made_again = [self.beside(part.ops, ops, size) for part in again]
        crossing = entering(size) + leaving(size)
        kept = max(0, memory.activations(size, ops) - sum(dropped)) + inputs + crossing
        return _OfMicroBatch(
            forward_s=seconds("F", ops),
            backward_s=seconds("B", ops),
            input_s=seconds("I", ops),
            weight_s=seconds("W", ops),
            halved_forward_s=seconds("H", ops),
            recompute_s=sum(self.again_s(device, part, size) for part in again),
            kept_bytes=with_loss(kept),
            recomputed_bytes=with_loss(sum(dropped)),
            redone_bytes=with_loss(max((a + b for a, b in zip(dropped, made_again, strict=True)), default=0)),
            weight_bytes=with_loss(self.halves.weight_bytes(*ops)(size)),
            gradient_bytes=with_loss(crossing),
        )

    def again_s(self, device: str, part: RecomputedPart, size: int) -> float:
        """Seconds of recomputing a part, per micro-batch."""
        key = (device, part, size)
        if key not in self._redone:
            redone = part.redone(self.graph, size, self.balance(device))
            self._redone[key] = redone * self.compute[device].seconds("F", part.ops, size)
        return self._redone[key]

    def balance(self, device: str) -> float:
        """The machine balance of a device: FLOPs per byte."""
        each = self.cluster.device(device)
        return _flops_per_byte(each, precision_of(self.recipe.precision, each.kind))

    def beside(self, part: Ops, ops: Ops, size: int) -> float:
        """Bytes that a recomputed part holds beside its own activations: its outputs, which still exist from the first forward, and their
        gradients. Outputs of the stage are counted as messages.
        """
        return 2 * self._read_by((part[1], len(self.graph.ops)))(size) if part[1] < ops[1] else 0.0

    def _read_by(self, part: Ops, since: int = 0) -> Size:
        """Bytes that the ops of a part read of ops before it, from op ``since`` on."""
        key = (since, *part)
        if key not in self._entering:
            starts = tuple(sorted({0, *key}))
            made, read = starts.index(since), starts.index(part[0])
            into = [
                c for c in crossings(self.graph, starts) if c.producer == made and read in c.consumers and made < read
            ]
            self._entering[key] = Size.total(c.bytes for c in into)
        return self._entering[key]

    def read_in(self, ops: Ops) -> frozenset[str]:
        """The names of the parameters that the ops read."""
        if ops not in self._reads:
            self._reads[ops] = frozenset(name for op in self.graph.ops[ops[0] : ops[1]] for name in op.parameters)
        return self._reads[ops]

    def made_in_first_half(self, ops: Ops, gradients: Mapping[str, float]) -> float:
        """Bytes of the gradients that I computes: all but those of linear layers."""
        here = self.graph.ops[ops[0] : ops[1]]
        early = {name for op in here if not self.halves.waits(op) for name in op.parameters}
        return sum(size for name, size in gradients.items() if name in early)


def _flops_per_byte(device: Device, precision: Precision) -> float:
    """The machine balance: FLOPs in the time in which its memory moves a byte; from the datasheet where the catalog has one.

    An op takes the longer of its FLOPs and its memory traffic (Williams, Waterman and Patterson, "Roofline", CACM 2009). This only
    divides the measured seconds of a block over its ops.
    """
    known = None if device.backend == "cpu" else find(device.kind)
    if known is not None and known.memory_bandwidth_bytes_per_s:
        peak = next((known.peak_flops[p] for p in _PEAKS[precision] if p in known.peak_flops), None)
        if peak is not None:
            return peak / known.memory_bandwidth_bytes_per_s
    return _OF_CPU if device.backend == "cpu" else _OF_OTHERS
