"""What one rank holds of a model under a plan: its weights, their masters, gradients and optimizer, and the state that is kept of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.plan.boxes import Box, inside
from heterodyne.plan.lower import Lowered
from heterodyne.plan.plan import Plan
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.assignment import Assignment
from heterodyne.runtime.executor import Step
from heterodyne.runtime.recapture.replaced_buffers import ReplacedBuffers
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.refused_construction import undone_if_refused
from heterodyne.runtime.weights.average import WeightAverage
from heterodyne.runtime.weights.between_steps import Sample, WeightWatch, sample_of
from heterodyne.runtime.weights.clipping import Clipping
from heterodyne.runtime.weights.finite import all_finite, findings, first_fault
from heterodyne.runtime.weights.gradients import GradientBuckets, require_no_hooks
from heterodyne.runtime.weights.host_room import host_state_bytes, require_host_room
from heterodyne.runtime.weights.left import Left
from heterodyne.runtime.weights.loss_scale import LossScale
from heterodyne.runtime.weights.masters import MasterWeights
from heterodyne.runtime.weights.materialise import place_weights
from heterodyne.runtime.weights.model_state import ModelState
from heterodyne.runtime.weights.optimizer import (
    OptimizerFactory,
    make_optimizer,
    norms_and_biases,
    optimizer_of,
    state_by_name,
)
from heterodyne.runtime.weights.outside_moves import OutsideMoves
from heterodyne.runtime.weights.ownership import Ownership
from heterodyne.runtime.weights.planned_gradients import bucket_channels, completed_gradients, ranges_by_rank
from heterodyne.runtime.weights.predicted import PredictedWeights, require_moments
from heterodyne.runtime.weights.sharded_parameters import ShardedParameters
from heterodyne.runtime.weights.trainable import require_none_unfrozen, trainable_parameters
from heterodyne.stored_weights import StoredWeights

__all__ = ["RankModel"]


class RankModel:
    """Of one rank. Making one is collective; the other arguments are those of `Worker`.

    Args:
        parameters, buffers: those that this rank holds, by name.
        cut: any rank runs pieces of the graph, which go the same way in each step.
        sharded: where plans shard parameters; None: each is whole on this rank, or not there at all.
        scale: of the loss, where any rank computes in fp16.
        moves: of the optimizer, outside of its step.
    """

    _closing: ExitStack

    @undone_if_refused
    def __init__(
        self,
        module: nn.Module,
        assignment: Assignment,
        *,
        optimizer: OptimizerSection | OptimizerFactory,
        recorder: Recorder,
        cut: bool,
        host_activation_bytes: int = 0,
        stored: StoredWeights | None = None,
        weights: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        lowered, rank, role = assignment.lowered, assignment.rank, assignment.role
        plan = lowered.plan
        self._module, self._role = module, role
        self._graph = graph = lowered.graph
        self._communicator = communicator = assignment.communicator
        self._placement = placement = lowered.placement
        self.ownership = Ownership.of(lowered)
        every_trained = trainable_parameters(module, graph)
        require_no_hooks(every_trained)  # of all, also of what others will hold: they would wait for the one that does
        trained = list(every_trained)
        buckets = [
            (bucket, process_group)
            for bucket, process_group in bucket_channels(assignment)
            if role.device in bucket.owners
        ]
        ranges = ranges_by_rank(lowered)
        of_each = {name: self.ownership.updated(rank, name) for name in trained}
        slices = {name: own for name, own in of_each.items() if own is not None}
        spec = lowered.specs[rank]
        self.sharded = (
            ShardedParameters(buckets, ranges, spec.readers, slices, communicator.device)
            if plan.zero > 2 and spec is not None
            else None
        )
        place_weights(
            module,
            communicator,
            lambda name: self.ownership.holders(name, range(communicator.world_size)),
            stored=stored,
            values=weights,
            keep=(lambda _, own: own) if self.sharded is None else self.sharded.keep,
        )
        self.buffers = dict(module.named_buffers())
        self.replaced = ReplacedBuffers(
            module, graph, self.buffers, self.ownership, rank=rank, device=communicator.device
        )
        self.parameters = {n: p for n, p in trainable_parameters(module, graph).items() if not p.is_meta}
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._known = frozenset(entry.name for entry in graph.parameters)
        self.masters = self._masters(plan, slices, optimizer, host_activation_bytes)
        self._closing.callback(self.masters.close)
        self._watch = WeightWatch(
            {n: p for n, p in self.parameters.items() if self.ownership.box(rank, n)}, self.masters.copies
        )
        self._watch.leave(look=True)
        self.scale = _loss_scale(lowered)
        self.optimizer = self._make_optimizer(optimizer)
        self._grouped = sum(len(group["params"]) for group in self.optimizer.param_groups)
        self.gradients = GradientBuckets(
            self.parameters,
            buckets,
            recorder,
            {name: self.ownership.box(rank, name) for name in self.parameters},
            ranges,
            weights=self.masters if plan.zero > 1 else None,
            same_way=cut,
        )
        self.expect(assignment)
        self._closing.callback(self.gradients.close)
        gathered = [a.index for a in assignment.actions if a.kind == "GATHER" and a.index is not None]
        self.moves = OutsideMoves(self.masters, self.gradients, communicator, gathered, self.ownership.shards.keys())
        self._asked = Left(self.masters.updated)
        self.state = ModelState(
            module,
            self.optimizer,
            self.masters,
            trained=trained,
            ownership=self.ownership,
            communicator=communicator,
            shards={} if self.sharded is None else self.sharded.own,
            drifts=len({(d.backend, d.kind) for d in lowered.cluster.devices}) > 1,
            leader=placement.leader,
            followers=[other.rank for other in placement.places if not other.micro_batches.samples],
            keeps_options=not isinstance(optimizer, OptimizerSection),
        )

    def expect(self, assignment: Assignment) -> None:
        """Expect the gradients of the graph of that assignment from the next step on. On all ranks together."""
        self.gradients.expect(assignment.lowered.graph.reached, completed_gradients(assignment))

    def _masters(
        self,
        plan: Plan,
        slices: Mapping[str, Range],
        optimizer: OptimizerSection | OptimizerFactory,
        host_activation_bytes: int,
    ) -> MasterWeights:
        """Collective. Raises PlanError if a host lacks memory for what is kept there."""
        stages = plan.pipelines[self._role.pipeline or 0].stages
        on_host = any(stages[number].offload for number in self._role.stages)
        if any(stage.offload or stage.offload_activations for p in plan.pipelines for stage in p.stages):
            kept = host_state_bytes(self.parameters, slices, optimizer) if on_host else 0
            require_host_room(self._communicator, state_bytes=kept, activation_bytes=host_activation_bytes)
        if self.sharded is not None:
            self.sharded.bind(self.parameters)
        return MasterWeights(
            self.parameters,
            {n: own for n, own in slices.items() if n in self.parameters},
            shards={} if self.sharded is None else self.sharded.own,
            on_host=on_host,
        )

    def _make_optimizer(self, optimizer: OptimizerSection | OptimizerFactory) -> torch.optim.Optimizer:
        """Of the parameters that this rank holds; it may hold none."""
        if isinstance(optimizer, OptimizerSection):
            undecayed = frozenset() if optimizer.decay_norms_and_biases else norms_and_biases(self._module)
            return make_optimizer(optimizer, self.masters.updated, undecayed=undecayed)
        every = trainable_parameters(self._module, self._graph)
        return optimizer_of(optimizer, self.masters.updated, self.parameters, every=every)

    def clipping(self, largest: float) -> Clipping:
        """Collective."""
        if self.ownership.whole:
            return Clipping(self.masters, self.parameters, {}, largest, None)
        counted: dict[str, list[Box]] = {
            name: [()]
            if name in self.ownership.shards
            else [
                inside(self.ownership.box(self._communicator.rank, name), box)
                for box, rank in self.ownership.parts(name)
                if rank == self._communicator.rank
            ]
            for name in self.parameters
        }
        process_group = self._communicator.process_group(self._placement.active)
        return Clipping(self.masters, self.parameters, counted, largest, process_group)

    def require_predictable(self, largest: float) -> None:
        """Raise PlanError if weights cannot be predicted between steps; ``largest``: see `clipping`."""
        require_moments(self.optimizer)
        if largest:
            raise PlanError(
                f"gradients are clipped to a norm of {largest:g}, which takes those of all ranks, and with predicted weights "
                "('async: predicted') ranks update at different times: write training.clip_grad_norm: 0 (clip_grad_norm=0), or leave "
                "'async' out"
            )

    def predicted(self) -> PredictedWeights:
        """Return what predicts the weights of this rank."""
        return PredictedWeights(
            self._module, self.parameters, self.masters.updated, self.masters.gradients, self.optimizer
        )

    def statistics(self, graph: ModelGraph) -> dict[str, Tensor]:
        """Return the buffers that a forward of this graph changes."""
        return {n: b for n, b in self.buffers.items() if graph.batch_statistics and not b.is_meta}

    def whole_everywhere(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that every rank holds whole."""
        of, everyone = self.ownership, range(self._communicator.world_size)
        cut = of.boxes.keys() | (of.shards.keys() if of.apart else set())
        stored = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        return {n: t for n, t in stored.items() if n not in cut and all(of.holds(rank, n) for rank in everyone)}

    @property
    def updates_parts(self) -> bool:
        """Whether no rank's optimizer has all trained weights, whole."""
        trained = {name for name, parameter in self._module.named_parameters() if parameter.requires_grad}
        return bool(self.ownership.shards) or not trained <= self.whole_everywhere().keys()

    def require_as_left(self, *, same: bool = False) -> None:
        """Raises PlanError where a parameter is trained now that was not when the model was captured, or has values that no step reads.

        ``same``: which parameters there are, and which are trained, is known to be as it was before the last step.
        """
        if not same:
            require_none_unfrozen(self._module, self._trained, self._known)
        self._regroup()
        self._watch.require_as_left()
        if self.sharded is not None:
            self.sharded.require_untouched()

    def _regroup(self) -> None:
        """Let groups that the script has given the optimizer hold what this rank updates of their parameters."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if count == self._grouped:
            return
        updated = {id(p): self.masters.updated.get(name) for name, p in self._module.named_parameters()}
        for group in self.optimizer.param_groups:
            held = [updated.get(id(p), p) for p in group["params"]]
            group["params"][:] = [p for p in held if p is not None]
        self._grouped = sum(len(group["params"]) for group in self.optimizer.param_groups)

    def leave(self, *, look: bool) -> None:
        """The user may change what is there from here on. ``look``: whether the next step compares values."""
        self._watch.leave(look=look)
        self.moves.leave()

    def weights_moved(self) -> bool:
        """Whether weights of any rank were changed since this was asked last. Collective."""
        moved = torch.tensor([float(bool(self._asked.changed()))], dtype=torch.float64)
        self._asked.leave()
        self._communicator.control.all_reduce(moved).wait()
        return bool(moved.item())

    @contextmanager
    def lent(self, *, look: bool) -> Iterator[None]:
        """As `MasterWeights.lent`. ``look``: see `leave`."""
        with self.masters.lent():
            yield
        self.leave(look=look)

    def average(self, decay: float) -> WeightAverage:
        """Return an average of the weights, which begins with them as they are."""
        shards = {} if self.sharded is None else self.sharded.own
        return WeightAverage(self._module, self.masters, self.ownership, self._communicator, shards, decay)

    def average_reads(self, name: str) -> bool:
        """Return whether this rank keeps anything of an average of that parameter."""
        if name in self.masters.names:
            return name in self.masters.updated
        return self.ownership.holds(self._communicator.rank, name)

    def sample(self) -> Sample:
        """A few values of all that must be alike on the ranks that hold it, and train."""
        if not self._role.micro_batches.samples:
            return {}
        apart = {} if self.sharded is None else self.sharded.own
        forward_changes = self._graph.opaque is not None or bool(self._graph.batch_statistics)
        held = {
            **dict(self._module.named_parameters()),
            **({} if forward_changes else dict(self._module.named_buffers())),
        }
        rank = self._communicator.rank
        return sample_of(
            {(n, self.ownership.box(rank, n)): t for n, t in held.items() if not t.is_meta and n not in apart}
        )

    def fault(self, work: Step, loss: float, statistics: Mapping[str, Tensor]) -> str:
        """What was not finite, found out by all ranks together; statistics that the forward has spoilt become what they were."""
        for name, value in statistics.items():
            self.buffers[name].copy_(value)
        gradients = {n: p.grad for n, p in self.parameters.items() if p.grad is not None} | self.masters.own_gradients
        weights: dict[str, Tensor] = {**self.parameters, **({} if self.sharded is None else self.sharded.own)}
        own = findings(self._graph, weights, gradients, list(work.losses.values()), self._role.stages)
        return first_fault(self._graph, self._communicator.all_gather_object(own), loss)

    def not_finite(self) -> str | None:
        """The first of the trained weights and of the optimizer's state on this rank that is not finite; None if all are."""
        states = state_by_name(self.optimizer, self.masters.updated)
        for name, parameter in self.masters.updated.items():
            held = states.get(name, {})
            for what, value in [("", parameter), *((f"the optimizer's {key} of ", held[key]) for key in held)]:
                if isinstance(value, Tensor) and not all_finite([value]):
                    return f"{what}{name}"
        return None

    def close(self) -> None:
        """Take the hooks off the model."""
        self._closing.close()


def _loss_scale(lowered: Lowered) -> LossScale | None:
    """None where nothing is computed in fp16. Raises PlanError where nothing would notice an overflow."""
    narrow = any(role.active and role.precision == "fp16" for role in lowered.placement.places)
    if not narrow and not any(p.trainable and p.dtype == "float16" for p in lowered.graph.parameters):
        return None
    if not lowered.clip:
        raise PlanError("fp16 needs the norm of the gradient, which tells an overflow: lower the plan with clip=True")
    return LossScale()
