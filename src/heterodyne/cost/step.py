"""The cost of every action of a plan on every rank: what the simulator plays."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.cluster.profile import DeviceProfile, Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cost.collective import Collectives
from heterodyne.cost.compute import Compute, compute_of
from heterodyne.cost.memory import DeviceMemory, MemoryAssumptions, MemoryUse
from heterodyne.cost.recipe import Recipe
from heterodyne.errors import MeasureError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.buckets import gradient_buckets
from heterodyne.plan.plan import Plan
from heterodyne.plan.program import Action

__all__ = ["CostModel", "RankCosts", "StepCosts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCosts:
    """What one rank does in one step, all in seconds of that device when nothing disturbs it.

    Args:
        forward_s, backward_s: one value a micro-batch.
        ready: for each gradient bucket, the fraction of the last backward after which it is complete.
        clip_s, step_s: clipping and the optimizer step.
        overhead_s: what a step takes besides its actions, spent at its start.
        overlap: seconds of compute lost per second of a collective in flight, in [0, 1].
        activation_bytes: what each micro-batch holds from its forward to its backward.
        fixed_bytes, workspace_bytes, update_bytes: see `MemoryUse`.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    ready: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    clip_s: float = 0.0
    step_s: float = 0.0
    overhead_s: float = 0.0
    overlap: float = 0.0
    fixed_bytes: int = 0
    workspace_bytes: int = 0
    update_bytes: int = 0

    @property
    def compute_s(self) -> float:
        """Seconds of all actions and the overhead, undisturbed: no step of this rank is shorter."""
        return sum(self.forward_s) + sum(self.backward_s) + self.clip_s + self.step_s + self.overhead_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """``ranks`` has None for an idle rank; ``reduce_s`` one value a gradient bucket."""

    ranks: tuple[RankCosts | None, ...]
    reduce_s: tuple[float, ...]

    @property
    def lower_bound_s(self) -> float:
        """No step is shorter: all that one rank computes, and all collectives, which run one after another."""
        return max([sum(self.reduce_s), *(costs.compute_s for costs in self.ranks if costs is not None)])

    def seconds(self, rank: int, action: Action) -> float:
        """Seconds of an action, undisturbed and without waiting. Raises KeyError for an action that the rank has no cost of."""
        costs = self.ranks[rank]
        if costs is None:
            raise KeyError(f"rank {rank} is idle and has no cost of {action}")
        if action.index is None:
            return costs.clip_s if action.kind == "CLIP" else costs.step_s
        values = {"F": costs.forward_s, "B": costs.backward_s, "REDUCE_GRAD": self.reduce_s}[action.kind]
        if action.index >= len(values):
            raise KeyError(f"rank {rank} has no cost of {action}")
        return values[action.index]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Everything that is believed about a model on a cluster. Raises MeasureError where a measurement is missing."""

    graph: ModelGraph
    cluster: Cluster
    profile: Profile
    recipe: Recipe = field(default_factory=Recipe)
    memory: MemoryAssumptions = field(default_factory=MemoryAssumptions)
    _uses: dict[tuple[str, int], MemoryUse] = field(
        default_factory=dict, repr=False, compare=False
    )  # a search asks often

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
    def _trainable_bytes(self) -> int:
        return self.graph.trainable_bytes

    @cached_property
    def collectives(self) -> Collectives:
        return Collectives(cluster=self.cluster, samples=self.profile.links)

    def measured(self, device: str) -> DeviceProfile:
        try:
            return self.profile.devices[device]
        except KeyError:
            raise MeasureError(f"{device} was not measured; measure again with 'heterodyne measure'") from None

    def update_s(self, device: str) -> float:
        """Seconds of the optimizer step."""
        return self.measured(device).optimizer_s_per_byte * self._trainable_bytes

    def clip_s(self, device: str) -> float:
        return self.recipe.clip_to_step * self.update_s(device)

    def fixed_s(self, device: str) -> float:
        """Seconds of a step that do not depend on the share: clipping, the optimizer, the overhead."""
        return self.update_s(device) + self.clip_s(device) + self.measured(device).step_overhead_s

    def memory_use(self, device: str, size: int) -> MemoryUse:
        """Bytes of a device that runs micro-batches of up to ``size`` samples."""
        if (device, size) not in self._uses:
            self._uses[device, size] = self.device_memory[device].use(size)
        return self._uses[device, size]

    def of(self, plan: Plan) -> StepCosts:
        """The costs of a plan whose pipelines have one stage on one device each."""
        buckets = gradient_buckets(self.graph, plan.bucket_bytes)
        ranks: list[RankCosts | None] = [None] * len(self.cluster.devices)
        for pipeline in plan.pipelines:
            device = pipeline.stages[0].devices[0]
            ready_blocks = [bucket.ready_block() for bucket in buckets]
            ranks[self.cluster.rank(device)] = self._rank(device, pipeline.micro_batches.sizes, ready_blocks)
        reduce = self.collectives.all_reduce(plan.devices)
        return StepCosts(ranks=tuple(ranks), reduce_s=tuple(reduce(bucket.bytes) for bucket in buckets))

    def _rank(self, device: str, sizes: tuple[int, ...], ready_blocks: list[int]) -> RankCosts:
        compute, measured = self.compute[device], self.measured(device)
        fractions = compute.ready_fractions(sizes[-1]) if sizes else (0.0,) * len(compute.blocks)
        use = self.memory_use(device, max(sizes, default=0))
        return RankCosts(
            forward_s=tuple(compute.forward.total(size) for size in sizes),
            backward_s=tuple(compute.backward.total(size) for size in sizes),
            ready=tuple(fractions[block] for block in ready_blocks),
            clip_s=self.clip_s(device),
            step_s=self.update_s(device),
            overhead_s=measured.step_overhead_s,
            overlap=min(1.0, max(0.0, measured.overlap)),
            activation_bytes=tuple(self.memory_use(device, size).activations for size in sizes),
            fixed_bytes=use.fixed,
            workspace_bytes=use.workspace,
            update_bytes=use.update,
        )
