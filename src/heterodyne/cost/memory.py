"""Bytes that one device needs, as an affine sum: what stays, and what one micro-batch adds.

Parameters, gradients and optimizer states do not shrink with the share of the batch: memory is affine in the micro-batch
size, not proportional to the share. Every term leans upwards; a plan that fits by this sum should fit in truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.cluster.profile import WHOLE, DeviceProfile
from heterodyne.cluster.spec import Device
from heterodyne.cost.curve import Curve
from heterodyne.cost.recipe import Recipe
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.buckets import gradient_buckets

__all__ = ["DeviceMemory", "MemoryAssumptions", "MemoryUse"]

_CONTEXT_BYTES: Mapping[str, int] = {"cpu": 512 * 2**20}


@dataclass(frozen=True, kw_only=True)
class MemoryAssumptions:
    """What no measurement of blocks tells.

    Args:
        context_bytes: what the framework occupies before there is a model, for each backend, where that was not measured. A CPU
            worker with torch 2.13, gloo and transformers 5, after an export, occupies 357 MiB; 512 are counted.
        other_context_bytes: the same for a backend that is not listed: a CUDA context with cuBLAS workspace and NCCL buffers stays
            under 1 GiB.
        fragmentation: the part of the tensors' bytes that the allocator loses to rounding and gaps. PyTorch's caching
            allocator rounds large blocks to 2 MiB; 5% is counted.
    """

    context_bytes: Mapping[str, int] = field(default_factory=lambda: dict(_CONTEXT_BYTES))
    other_context_bytes: int = 2**30
    fragmentation: float = 0.05

    def context(self, backend: str) -> int:
        return self.context_bytes.get(backend, self.other_context_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes of one device, part by part.

    Args:
        parameters: parameters and buffers, and their bf16 copies that autocast keeps.
        gradients, optimizer: of the trainable parameters.
        buckets: gradients on their way. They live in flat buckets and are reduced in place; twice the largest bucket is
            counted on top: what autograd hands over before it is copied in, and what the collective works in.
        activations: what one micro-batch keeps from forward to backward; 0 without one.
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
    """Memory of one device as a function of the micro-batch size. ``profile`` None: nothing was measured, the graph is believed."""

    graph: ModelGraph
    device: Device
    recipe: Recipe
    profile: DeviceProfile | None = None
    assumptions: MemoryAssumptions = field(default_factory=MemoryAssumptions)

    @cached_property
    def _saved(self) -> Curve | None:
        """Bytes from forward to backward: of the model in one piece where measured, else the sum of its blocks, else None."""
        measured = {} if self.profile is None else self.profile.blocks
        curves = {
            kind: Curve.envelope((s.micro_batch_size, s.saved_bytes) for s in samples)
            for kind, samples in measured.items()
            if any(s.saved_bytes > 0 for s in samples)
        }
        if WHOLE in curves:
            return curves[WHOLE]
        if not all(block.kind in curves for block in self.graph.blocks):
            return None
        sizes = sorted({size for curve in curves.values() for size in curve.sizes})
        return Curve.envelope((size, sum(curves[block.kind](size) for block in self.graph.blocks)) for size in sizes)

    @property
    def _context(self) -> int:
        """As measured, or else as assumed."""
        measured = 0 if self.profile is None else self.profile.context_bytes
        return measured or self.assumptions.context(self.device.backend)

    def activations(self, size: int) -> int:
        """Bytes that one micro-batch of that many samples keeps from its forward to its backward."""
        if size == 0:
            return 0
        return round(self._saved(size) if self._saved is not None else self.graph.bytes_saved()(size))

    @cached_property
    def _transient(self) -> Curve | None:
        """Measured bytes beyond weights, gradients and saved activations; None where the device does not tell its peak.

        Of the model in one piece where measured, else of the worst of its blocks.
        """
        measured = {} if self.profile is None else self.profile.blocks
        known = {
            kind: [(s.micro_batch_size, max(0, s.peak_bytes - s.saved_bytes)) for s in samples]
            for kind, samples in measured.items()
            if samples and all(s.peak_bytes > 0 for s in samples)
        }
        if WHOLE in known:
            return Curve.envelope(known[WHOLE])
        if not known or not all(block.kind in known for block in self.graph.blocks):
            return None
        curves = [Curve.envelope(points) for points in known.values()]
        sizes = sorted({size for curve in curves for size in curve.sizes})
        return Curve.envelope((size, max(curve(size) for curve in curves)) for size in sizes)

    def workspace(self, size: int) -> int:
        """Bytes that come and go inside a backward: measured, else gradients of inputs and outputs of the largest op, twice.

        Twice, since where paths join (skip connections) a second gradient waits for the first.
        """
        if size == 0:
            return 0
        if self._transient is not None:
            return round(self._transient(size))
        return round(2 * max((op.bytes_read(size) + op.bytes_written(size) for op in self.graph.ops), default=0))

    def use(self, size: int) -> MemoryUse:
        """The peak when micro-batches of up to ``size`` samples run one after the other; 0: no share, only the update."""
        trainable = [p for p in self.graph.parameters if p.trainable]
        gradients = sum(p.bytes for p in trainable)
        states = sum(max(p.bytes, 4 * p.numel) for p in trainable)  # states of narrow parameters are kept in fp32
        autocast = 2 * self.graph.parameter_count if self.recipe.precision == "bf16" else 0
        parameters = self.graph.parameter_bytes + self.graph.buffer_bytes + autocast
        optimizer = self.recipe.states * states
        largest = max((bucket.bytes for bucket in gradient_buckets(self.graph, self.recipe.bucket_bytes)), default=0)
        buckets = min(gradients, 2 * largest)
        tensors = parameters + optimizer + gradients + buckets + self.activations(size)
        return MemoryUse(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            buckets=buckets,
            activations=self.activations(size),
            workspace=self.workspace(size),
            update=max((max(p.bytes, 4 * p.numel) for p in trainable), default=0),
            lost=round(self.assumptions.fragmentation * tensors),
            context=self._context,
        )
