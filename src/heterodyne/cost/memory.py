"""Bytes that one device needs, as an affine sum: what is constant, and what one micro-batch adds.

Parameters, gradients and optimizer state do not shrink with the share of the batch: memory is affine in the micro-batch size, not
proportional to the share. Every term errs upwards; a plan that fits by this sum should fit in truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from heterodyne.cluster.profile import WHOLE, DeviceProfile
from heterodyne.cluster.spec import Device
from heterodyne.cost.curve import Curve
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import Block, ModelGraph, Op, Parameter, dtype_bytes
from heterodyne.graph.size import Size
from heterodyne.plan.boxes import Box

__all__ = ["DeviceMemory", "MemoryAssumptions", "MemoryUse", "gradient_bytes"]

Ops: TypeAlias = tuple[int, int]
"""The ops ``[start, stop)`` of a graph."""

_ALL_OF_EACH: Mapping[str, Box] = {}
_CONTEXT_BYTES: Mapping[str, int] = {"cpu": 512 * 2**20}


@dataclass(frozen=True, kw_only=True)
class MemoryAssumptions:
    """What no measurement of blocks tells.

    Args:
        context_bytes: what the framework occupies before there is a model, for each backend, where that was not measured. A CPU
            worker with torch 2.13, gloo and transformers 5, after an export, occupies 357 MiB; 512 are counted.
        other_context_bytes: the same for a backend that is not listed: a CUDA context with cuBLAS workspace and NCCL buffers stays
            under 1 GiB.
        growth_bytes: what a measured context grows by in training and no account explains: heaps of threads, objects of the interpreter,
            holes. What planning, trials and rehearsals keep is measured, what the C heap touches in a block too. Up to 17 MiB
            were seen, in a first stage whose backwards come whole; 16 are counted.
        fragmentation: the part of the tensors' bytes that the allocator of a device loses to rounding and gaps. PyTorch's caching
            allocator rounds large blocks to 2 MiB; 5% is counted.
        heap_fragmentation: the same of the C heap of a CPU worker, at most ``fragmentation``. It rounds to 64 bytes, and what comes and
            goes in a step finds the places of the step before.
        block_bytes: that allocators of devices hand out at least: a bias, or the count of steps that AdamW keeps of each parameter.
    """

    context_bytes: Mapping[str, int] = field(default_factory=lambda: dict(_CONTEXT_BYTES))
    other_context_bytes: int = 2**30
    growth_bytes: int = 16 * 2**20
    fragmentation: float = 0.05
    heap_fragmentation: float = 0.01
    block_bytes: int = 512

    def context(self, backend: str) -> int:
        return self.context_bytes.get(backend, self.other_context_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes of one device, part by part.

    Args:
        parameters: parameters and buffers.
        gradients: of the trainable parameters, in fp32 at least.
        optimizer: with the fp32 masters of parameters in 16 bits.
        buckets: gradients on their way. They are reduced in place, in flat buckets; the largest parameter is counted on top, whose
            gradient autograd hands over before it is copied in; not where the workspace was measured, which has it. What collectives
            work in is of the framework, or of the host.
        activations: what one micro-batch keeps from forward to backward, the narrow copies of weights that autocast makes for it among
            that; 0 without one.
        workspace: what comes and goes inside an op on top of that.
        update: what comes and goes inside clipping and the optimizer step, when activations and workspace are gone. Both work in
            place; one more copy of the largest parameter is counted.
        lost: to the allocator.
        context: the framework itself.
    """

    parameters: int
    gradients: int
    optimizer: int
    buckets: int
    activations: int
    workspace: int
    update: int
    lost: int
    context: int

    def with_state(self, part: float) -> MemoryUse:
        """With only that fraction of the optimizer state of its weights."""
        return replace(self, optimizer=round(part * self.optimizer))

    @property
    def tensors(self) -> int:
        """All tensors without workspace."""
        return self.parameters + self.gradients + self.optimizer + self.buckets + self.activations

    @property
    def fixed(self) -> int:
        """What does not depend on the micro-batch."""
        return self.parameters + self.gradients + self.optimizer + self.buckets + self.lost + self.context

    @property
    def total(self) -> int:
        """The peak: that of forward and backward, or that of the optimizer step."""
        return self.fixed + max(self.activations + self.workspace, self.update)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Memory of one device as a function of the micro-batch size. ``profile`` None: nothing was measured, the graph is believed.

    Where a method asks for ``ops``, it is about the stage of the ops ``[start, stop)``; None: the whole model. Of a stage that lies in
    parts on several devices, ``kept`` and ``moved`` say what falls to this one, by the names of the ops.
    """

    graph: ModelGraph
    device: Device
    recipe: Recipe
    profile: DeviceProfile | None = None
    assumptions: MemoryAssumptions = field(default_factory=MemoryAssumptions)

    @cached_property
    def _saved(self) -> dict[str, Curve]:
        """Measured bytes from forward to backward, for each kind; empty unless the model or every block was measured."""
        measured = {} if self.profile is None else self.profile.blocks
        curves = {
            kind: Curve.envelope((s.micro_batch_size, s.saved_bytes) for s in samples)
            for kind, samples in measured.items()
            if any(s.saved_bytes > 0 for s in samples) or self._keeps_nothing(kind)
        }
        return curves if WHOLE in curves or self._all_in(curves) else {}

    def _keeps_nothing(self, kind: str) -> bool:
        """Return whether a kind of block keeps nothing by the graph, so that 0 is no lack of a measurement."""
        block = self.graph.kinds.get(kind)
        return block is not None and self.graph.bytes_saved(block)(1) == 0

    @cached_property
    def _saved_by_all(self) -> Curve | None:
        """Of the model in one piece where measured, else the sum of its blocks, else None."""
        if WHOLE in self._saved or not self._saved:
            return self._saved.get(WHOLE)
        sizes = sorted({size for curve in self._saved.values() for size in curve.sizes})
        return Curve.envelope((size, sum(self._saved[b.kind](size) for b in self.graph.blocks)) for size in sizes)

    def _all_in(self, curves: Mapping[str, Curve]) -> bool:
        return all(block.kind in curves for block in self.graph.blocks)

    @property
    def _context(self) -> int:
        """As measured, and what comes to it until the first step; or else as assumed."""
        measured = 0 if self.profile is None else self.profile.context_bytes
        return measured + self.assumptions.growth_bytes if measured else self.assumptions.context(self.device.backend)

    def activations(self, size: int, ops: Ops | None = None, kept: Mapping[str, float] | None = None) -> int:
        """Bytes that one micro-batch of that many samples keeps from its forward to its backward.

        Of a stage: the sum of what its blocks were measured to keep, the part of a block that is cut inside as the graph has it. If
        the model in one piece keeps more than the sum of its blocks, so does each stage. ``kept``: of each op the part that is kept here.
        """
        if size == 0:
            return 0
        start, stop = ops or (0, len(self.graph.ops))
        by_graph, copies = self._kept_by_graph(start, stop, size, kept), self._copies(start, stop, kept)
        if not self._saved:
            return round(by_graph + copies)
        whole = self._saved_by_all
        assert whole is not None  # there are curves
        if (start, stop) == (0, len(self.graph.ops)) and kept is None:
            return round(whole(size) + copies)
        if not self._all_in(self._saved):
            all_by_graph = self.graph.bytes_saved()(size)
            return round(whole(size) * (by_graph / all_by_graph if all_by_graph > 0 else 1.0) + copies)
        summed = sum(self._saved[block.kind](size) for block in self.graph.blocks)
        parts = sum(self._saved[b.kind](size) * self._part(b, start, stop, size, kept) for b in self.graph.blocks)
        return round(parts * (max(1.0, whole(size) / summed) if summed > 0 else 1.0) + copies)

    def _kept_by_graph(self, start: int, stop: int, size: int, kept: Mapping[str, float] | None) -> float:
        ops = self.graph.ops[start:stop]
        if kept is None:
            return Size.total(op.bytes_saved for op in ops)(size)
        return sum(op.bytes_saved(size) * kept[op.name] for op in ops)

    def _copies(self, start: int, stop: int, kept: Mapping[str, float] | None) -> float:
        """Of the narrow copies of weights that autocast makes: of all that are read, or less where less was measured."""
        if not self.recipe.autocast:
            return 0.0
        numel = {p.name: p.numel for p in self.graph.parameters}
        read = {name: op.name for op in self.graph.ops[start:stop] for name in op.parameters if name in numel}
        by_graph = sum(2 * numel[name] * (1.0 if kept is None else kept[op]) for name, op in read.items())
        measured = {} if self.profile is None else self.profile.blocks
        kinds = [block.kind for block in self.graph.blocks if block.start < stop and start < block.stop]
        if any(kind not in measured for kind in kinds):
            kinds = [WHOLE] if WHOLE in measured else []
        known = sum(max((sample.copied_bytes for sample in measured[kind]), default=0) for kind in kinds)
        return min(by_graph, known) if kinds and self._saved else by_graph

    def _part(self, block: Block, start: int, stop: int, size: int, kept: Mapping[str, float] | None) -> float:
        """The part of what a block keeps that its ops in ``[start, stop)`` keep."""
        low, high = max(start, block.start), min(stop, block.stop)
        if low >= high:
            return 0.0
        if (low, high) == (block.start, block.stop) and kept is None:
            return 1.0
        of_block = self.graph.bytes_saved(block)(size)
        own = self._kept_by_graph(low, high, size, kept)
        return own / of_block if of_block > 0 else (high - low) / (block.stop - block.start)

    @cached_property
    def _transient(self) -> dict[str, Curve]:
        """Measured bytes beyond weights, gradients and saved activations, for each kind; empty where the device does not tell its peak."""
        measured = {} if self.profile is None else self.profile.blocks
        known = {
            kind: Curve.envelope(
                (s.micro_batch_size, max(0, s.peak_bytes - s.saved_bytes - s.copied_bytes)) for s in samples
            )
            for kind, samples in measured.items()
            if samples and all(s.peak_bytes > 0 for s in samples)
        }
        return known if WHOLE in known or self._all_in(known) else {}

    @property
    def tells_peaks(self) -> bool:
        """Whether the transient memory of passes was measured, the gradient that autograd hands over included."""
        return bool(self._transient)

    def workspace(
        self,
        size: int,
        ops: Ops | None = None,
        moved: Mapping[str, float] | None = None,
        *,
        boxes: Mapping[str, Box] = _ALL_OF_EACH,
        again: bool = False,
    ) -> int:
        """Bytes that come and go inside a backward: measured, else gradients of inputs and outputs of the largest op, twice.

        Twice, since where paths join (skip connections) a second gradient waits for the first. Measured is the model in one piece, or
        else, and for a stage, the worst of its blocks. ``moved``: the bytes that each op reads and writes here; what was measured
        shrinks as the largest of them does. ``boxes``: of the parameters that are here in part, which. ``again``: the worst of its blocks
        counts as well: blocks are computed again one by one, or gradients come while activations go, so it is not only the moment that
        matters at which most is kept.
        """
        if size == 0:
            return 0
        start, stop = ops or (0, len(self.graph.ops))
        known = self._transient
        whole = known[WHOLE](size) * self._shrunk(start, stop, size, moved) if WHOLE in known else 0.0
        all_ops = (start, stop) == (0, len(self.graph.ops))
        if known and (WHOLE not in known or ((again or not all_ops) and self._all_in(known))):
            blocks = [block for block in self.graph.blocks if block.start < stop and start < block.stop]
            worst = max((known[b.kind](size) * self._shrunk(b.start, b.stop, size, moved) for b in blocks), default=0.0)
            return round(max(worst + self.gradients_that_wait((start, stop), boxes), whole if all_ops else 0.0))
        if known:
            return round(whole)
        return round(
            2 * (self._most_flowing(start, stop, size) if moved is None else self._largest_op(start, stop, size, moved))
        )

    def holes(self, size: int, ops: Ops) -> int:
        """Bytes of holes in the C heap that a backward of a stage leaves: small tensors come to lie in the place of a gradient that was
        handed over, and the next one as large as that goes elsewhere, so that those of one block may be there twice.

        Of no device with an allocator of its own, of halves of a backward, which add up in place, or where no peak was measured.
        """
        if self.device.backend != "cpu" or not size or not self.tells_peaks:
            return 0
        blocks = [block for block in self.graph.blocks if block.start < ops[1] and ops[0] < block.stop]
        handed = (sum(gradient_bytes(p) for p in self.graph.parameters_of(b) if p.trainable) for b in blocks)
        return min(self.workspace(size, ops), max(handed, default=0))

    @property
    def tells_blocks(self) -> bool:
        """Whether as much is known of blocks as of the model in one piece."""
        return not self._transient or self._all_in(self._transient)

    def gradients_that_wait(self, ops: Ops, boxes: Mapping[str, Box]) -> int:
        """Of parameters that several blocks read: autograd holds the gradient from one until it has that from the others."""
        blocks = [block for block in self.graph.blocks if block.start < ops[1] and ops[0] < block.stop]
        readers = Counter(
            name for block in blocks for name in {n for op in self.graph.ops_of(block) for n in op.parameters}
        )
        return sum(gradient_bytes(p) for p in self.held(None, boxes) if p.trainable and readers[p.name] > 1)

    def _most_flowing(self, start: int, stop: int, size: int) -> float:
        """The most bytes of inputs and outputs of one op. Its weights are no part of them, and their gradient is counted by itself."""
        stored = self.graph.stored

        def flowing(op: Op) -> float:
            read, weights = op.bytes_read(size), sum(stored[name].bytes for name in op.parameters)
            return (read - weights if read >= weights else read) + op.bytes_written(size)

        return max(map(flowing, self.graph.ops[start:stop]), default=0.0)

    def _largest_op(self, start: int, stop: int, size: int, moved: Mapping[str, float] | None = None) -> float:
        """The most bytes that one op reads and writes; ``moved`` may leave out ops."""
        ops = self.graph.ops[start:stop]
        if moved is not None:
            return max((moved.get(op.name, 0.0) for op in ops), default=0.0)
        return max((op.bytes_read(size) + op.bytes_written(size) for op in ops), default=0.0)

    def _shrunk(self, start: int, stop: int, size: int, moved: Mapping[str, float] | None) -> float:
        whole = 0.0 if moved is None else self._largest_op(start, stop, size)
        return self._largest_op(start, stop, size, moved) / whole if whole > 0 else 1.0

    def held(
        self, stages: Sequence[Ops] | None = None, boxes: Mapping[str, Box] = _ALL_OF_EACH
    ) -> tuple[Parameter, ...]:
        """The parameters and buffers that a device with these stages (None: the whole model) has: what their ops read, once each.

        What no op at all reads is held by every device. Of those in ``boxes`` the device has that box alone, and such is their shape.
        """
        found = self._held(stages)
        return tuple(replace(p, shape=_box_shape(boxes[p.name], p.shape)) if p.name in boxes else p for p in found)

    def _held(self, stages: Sequence[Ops] | None) -> tuple[Parameter, ...]:
        stored = (*self.graph.parameters, *self.graph.buffers)
        if stages is None or any(tuple(stage) == (0, len(self.graph.ops)) for stage in stages):
            return stored
        anywhere = {name for op in self.graph.ops for name in op.parameters}
        here = {name for start, stop in stages for op in self.graph.ops[start:stop] for name in op.parameters}
        return tuple(p for p in stored if p.name in here or p.name not in anywhere)

    def use(self, size: int, stages: Sequence[Ops] | None = None, boxes: Mapping[str, Box] = _ALL_OF_EACH) -> MemoryUse:
        """The peak when micro-batches of up to ``size`` samples run one after the other; 0: no share, only the update.

        With ``stages``, of a device that has these stages of a pipeline: activations of one micro-batch in each of them, all of it.
        ``boxes``: of the parameters that it has a part of, which.
        """
        held = self.held(stages, boxes)
        trainable = [p for p in held if p.trainable]
        gradients = sum(gradient_bytes(p) for p in trainable)
        # States of narrow parameters are kept in fp32, and there is a master of each.
        optimizer = round(sum(max(4, dtype_bytes(p.dtype)) * self.recipe.state_values(p.shape) for p in trainable))
        optimizer += sum(4 * p.numel for p in trainable if dtype_bytes(p.dtype) < 4)
        parameters = sum(p.bytes for p in held)
        largest = max(map(gradient_bytes, trainable), default=0)
        buckets = 0 if self.tells_peaks else largest
        ranges = [None] if stages is None else list(stages)
        activations = sum(self.activations(size, ops) for ops in ranges)
        return MemoryUse(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            buckets=buckets,
            activations=activations,
            workspace=max((self.workspace(size, ops) for ops in ranges), default=0),
            update=largest,
            lost=self.lost(parameters + optimizer + gradients + buckets + activations, len(held) + 4 * len(trainable)),
            context=self._context,
        )

    @property
    def usable_bytes(self) -> int:
        """What is left for tensors beside the framework and what the allocator loses; below 0 where there is no room for these."""
        return int((self.device.memory_bytes - self._context) / (1 + self.lost_part))

    @property
    def lost_part(self) -> float:
        """Of the bytes of tensors, what the allocator loses beside them."""
        both = self.assumptions.fragmentation, self.assumptions.heap_fragmentation
        return min(both) if self.device.backend == "cpu" else both[0]

    def lost(self, tensors: float, count: int = 0) -> int:
        """What the allocator loses beside so many bytes of tensors, of which so many are small."""
        return round(self.lost_part * tensors) + self.assumptions.block_bytes * count


def gradient_bytes(parameter: Parameter) -> int:
    """Of its gradient, which is summed in fp32 at least."""
    return max(parameter.bytes, 4 * parameter.numel)


def _box_shape(box: Box, shape: Sequence[int]) -> tuple[int, ...]:
    """Of a box of a tensor of that shape."""
    spanned = {cut.dim: cut.stop - cut.first for cut in box}
    return tuple(spanned.get(dim, size) for dim, size in enumerate(shape))
