"""One worker: the model of one rank, trained by obeying the program of a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import DataError, PlanError, WorkerError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.loss_count import LossCount
from heterodyne.plan.boxes import Box, inside
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import Precision
from heterodyne.plan.program import Program
from heterodyne.plan.state_shards import Range
from heterodyne.plan.traffic import duties
from heterodyne.processes.heap import trim_heap
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.evaluation import evaluate
from heterodyne.runtime.exact.later_batches import LaterBatches
from heterodyne.runtime.exact.weighting import Weights, part_statistics
from heterodyne.runtime.executor import Executor, Step, Watch
from heterodyne.runtime.failed_lookups import told_with_place
from heterodyne.runtime.out_of_memory import longer_than_planned, told_with_stage
from heterodyne.runtime.placement import Placement, RankRole
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.same_batch import is_looked_at
from heterodyne.runtime.slices import BatchSource, GlobalBatchLike, OneShape, as_source
from heterodyne.runtime.stages.stage_builder import (
    StageBuilder,
    StagePrograms,
    StageRuntime,
    bucket_channels,
    completed_gradients,
    ranges_by_rank,
)
from heterodyne.runtime.values_in_range import ValuesInRange
from heterodyne.runtime.weights.clipping import Clipping
from heterodyne.runtime.weights.finite import all_finite, findings, first_fault
from heterodyne.runtime.weights.gradients import GradientBuckets
from heterodyne.runtime.weights.held_state import Held
from heterodyne.runtime.weights.host_room import require_host_room
from heterodyne.runtime.weights.loss_scale import LossScale
from heterodyne.runtime.weights.masters import MasterWeights
from heterodyne.runtime.weights.materialise import Stored, place_weights
from heterodyne.runtime.weights.optimizer import (
    OptimizerFactory,
    learning_rate,
    make_optimizer,
    norms_and_biases,
    optimizer_of,
    state_by_name,
)
from heterodyne.runtime.weights.ownership import Ownership
from heterodyne.runtime.weights.sharded_parameters import ShardedParameters
from heterodyne.runtime.weights.trainable import require_none_unfrozen, require_trained, trainable_parameters
from heterodyne.runtime.weights.worker_state import WorkerState

__all__ = ["OptimizerFactory", "StepResult", "Worker"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to; the same on every rank, but for ``seconds`` and ``samples``.

    Args:
        step: counted from 0.
        loss: of the global batch, exactly as one device would have it.
        lr: the learning rate that was used.
        samples: of this rank.
        count: what the loss counts in the global batch (samples, or tokens).
        seconds: of this rank.
        scale: of the loss, where any rank computes in fp16.
        overflow: the step was skipped because the scaled gradients left the range of fp16; the next step has half the scale.
        fault: what was not finite in loss or gradients, and where; the step was then skipped: nothing was updated. None otherwise.
    """

    step: int
    loss: float
    lr: float
    samples: int
    count: float
    seconds: float
    norm: Tensor | None = None
    scale: float | None = None
    overflow: bool = False
    fault: str | None = None

    @property
    def grad_norm(self) -> float | None:
        """The global norm before clipping; None on idle ranks. Waits for the device."""
        return None if self.norm is None else self.norm.item()


class Worker:
    """The model of one rank.

    Making a worker, `step`, `gradients`, `evaluate` and `state_dict` are collective: every rank calls them, in the same order.

    Args:
        module: the user's model, in the mode (train or eval) in which it shall be trained. It is moved to the device. On rank 0
            with its weights; other ranks get those, so theirs may be on the meta device.
        graph: what `capture` says of it.
        plan, program, cluster: who does what; the program is the plan's, lowered. Ranks are places in the cluster.
        communicator: of this rank, on its device. It stays the caller's to close.
        loss_count: how the losses of the parts of a batch make up the loss of the batch.
        optimizer: a section of a job, or a function that makes an optimizer from parameters (its rate then stays its own); it is given
            ``(name, parameter)`` pairs if its first argument is called ``named_parameters``.
        total_steps: that the schedule of the learning rate stretches over.
        seed: of the dropout masks.
        clip_grad_norm: the norm to which CLIP scales the gradient down; 0: it is not scaled.
        host_activation_bytes: of activations that this rank has in the memory of its host at a time, as was predicted: there must be room.
        recorder: notes what happens when; None: nothing is noted.
        watch: is told what this rank is doing (a `Watchdog`); None: nobody is.
        stage_programs: what makes stages of the captured model; only asked by plans that cut it.
        compiled: ``torch.compile(module)``, which runs where the module runs as it is; None: the module itself does.
        compile_stages: pieces of the captured model are compiled too.
        whole_weights: the optimizer must see each weight whole, so the state of none is cut.
        stored: where parameters are that no rank has yet; each reads what it holds.
        weights: on rank 0 those of a model without any, by name; None: its module has them, or they are ``stored``.
        say: takes lines for people.

    Raises PlanError if model, program and cluster do not go together, or a host lacks memory for what is kept there; WorkerError if
    ranks have built different models.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        graph: ModelGraph,
        plan: Plan,
        program: Program,
        cluster: Cluster,
        communicator: Communicator,
        loss_count: LossCount,
        optimizer: OptimizerSection | OptimizerFactory,
        total_steps: int,
        seed: int = 0,
        clip_grad_norm: float = 1.0,
        host_activation_bytes: int = 0,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
        stage_programs: StagePrograms | None = None,
        compiled: Callable[..., object] | None = None,
        compile_stages: bool = False,
        whole_weights: bool = False,
        stored: Stored | None = None,
        weights: Iterable[tuple[str, Tensor]] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        given = stored is not None or weights is not None
        _require_together(module, program, cluster, communicator, given=given)
        self.module = module
        self.graph = graph
        self.plan = plan
        self.rank = communicator.rank
        self.steps_done = 0
        self.placement = Placement.of(plan, cluster)
        self.ownership = Ownership.of(plan, graph, cluster, whole_weights=whole_weights)
        self.recorder = recorder or Recorder(rank=self.rank, device=communicator.device, on=False)
        self._communicator = communicator = communicator.branch()
        self._loss_count = loss_count
        self._section = optimizer if isinstance(optimizer, OptimizerSection) else None
        self._total_steps = total_steps
        self._watch = watch
        self._values = ValuesInRange(graph)
        trained = list(trainable_parameters(module, graph))
        every = bucket_channels(plan, graph, cluster, communicator)
        buckets = [(bucket, process_group) for bucket, process_group in every if self._role.device in bucket.owners]
        ranges = ranges_by_rank(plan, graph, cluster, whole_weights=whole_weights)
        of_each = {name: self.ownership.updated(self.rank, name) for name in trained}
        slices = {name: own for name, own in of_each.items() if own is not None}
        duty = duties(plan, graph, cluster)[self.rank]
        self._sharded = (
            ShardedParameters(buckets, ranges, duty.readers, slices, communicator.device)
            if plan.zero > 2 and duty is not None
            else None
        )
        place_weights(
            module,
            communicator,
            lambda name: self.ownership.holders(name, range(communicator.world_size)),
            stored=stored,
            values=weights,
            keep=(lambda _, own: own) if self._sharded is None else self._sharded.keep,
        )
        self._buffers = dict(module.named_buffers())
        self._statistics = {n: b for n, b in self._buffers.items() if graph.batch_statistics and not b.is_meta}
        self._parameters = {n: p for n, p in trainable_parameters(module, graph).items() if not p.is_meta}
        self._trained = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
        on_host = any(plan.pipelines[self._role.pipeline or 0].stages[number].offload for number in self._role.stages)
        if any(stage.offload or stage.offload_activations for p in plan.pipelines for stage in p.stages):
            kept = sum(_length(slices.get(n, (0, p.numel()))) for n, p in self._parameters.items()) if on_host else 0
            require_host_room(communicator, elements=kept, activation_bytes=host_activation_bytes)
        if self._sharded is not None:
            self._sharded.bind(self._parameters)
        shards = {} if self._sharded is None else self._sharded.own
        self._masters = MasterWeights(
            self._parameters,
            {n: own for n, own in slices.items() if n in self._parameters},
            shards=shards,
            on_host=on_host,
        )
        self._scale = _loss_scale(self.placement, graph, program)
        self.optimizer = self._make_optimizer(optimizer)
        self._gradients = GradientBuckets(
            self._parameters,
            buckets,
            self.recorder,
            completed_gradients(program.ranks[self.rank], plan, graph, self._role),
            {name: self.ownership.box(self.rank, name) for name in self._parameters},
            ranges,
            weights=self._masters if plan.zero > 1 else None,
            same_way=graph.opaque is None,
        )
        self._state = WorkerState(
            module,
            self.optimizer,
            self._masters,
            trained=trained,
            ownership=self.ownership,
            communicator=communicator,
            shards=shards,
            drifts=len({(d.backend, d.kind) for d in cluster.devices}) > 1,
            leader=self.placement.leader,
            followers=[role.rank for role in self.placement.places if not role.micro_batches.samples],
            keeps_options=not isinstance(optimizer, OptimizerSection),
        )
        self._later = (
            None
            if graph.opaque is None
            else LaterBatches(module, graph, loss_count, device=communicator.device, precision=self._role.precision)
        )
        self._stages = StageBuilder(
            module,
            graph=graph,
            plan=plan,
            program=program,
            cluster=cluster,
            placement=self.placement,
            communicator=communicator,
            programs=stage_programs,
            home=self._gradients,
            seed=seed,
            compiled=compiled,
            compile_stages=compile_stages,
            say=say,
        )
        self._stages.parts()
        self._first = True  # no step has been done here
        self._before: dict[str, Tensor] = {}  # statistics as they were before the step under way
        self._settled = None if communicator.device.type == "cpu" else torch.Event(communicator.device)
        self._executor = Executor(
            rank=self.rank,
            program=program,
            loss_stage=self._role.stages[-1] if self._role.last else None,
            gradients=self._gradients,
            weights=self._masters,
            sharded=self._sharded,
            scale=self._scale,
            optimizer=self.optimizer,
            clipping=self._clipping(clip_grad_norm),
            control=communicator.control,
            recorder=self.recorder,
            watch=watch,
        )

    def step(self, batch: GlobalBatchLike, step: int | None = None) -> StepResult:
        """Train on one global batch, the same on every rank. ``step`` None: the one after the last.

        The batch is tensors by input name, or hands out samples (`BatchSource`), so that a rank reads only its own.
        Raises DataError for a batch of another size than the plan's, one in which nothing counts, or values that the model cannot look
        up, and CaptureError where it would train nothing.
        """
        require_trained(self.graph)
        started_s = time.perf_counter()
        number = self.steps_done if step is None else step
        work = self._work(batch, number)
        self._before = before = {name: buffer.clone() for name, buffer in self._statistics.items()}
        with self._told_of_memory(number), told_with_place(self.module, f"step {number + 1}"):
            if self._later is not None and is_looked_at(number):
                self._later.require(work.source, self._role.spans(), number)
            loss = self._executor.run(work)
        fault = self._fault(work, loss, before) if work.skipped else None
        scale = None if self._scale is None else self._scale.value
        overflow = work.skipped and scale is not None and scale > 1 and math.isfinite(loss)
        if self._scale is not None:
            self._scale.update(overflow=work.skipped)
            if overflow:
                fault = f"{fault}: fp16 overflows at a loss scale of {scale:g}, the next step has {self._scale.value:g}"
        if not self._role.active and fault is None:
            self.optimizer.step()  # of no gradients: schedulers count steps, and here the program has none
        self._before = {}
        self.steps_done = number + 1
        self._executor.updating = False
        if self._first and self._communicator.device.type == "cpu":
            # The optimizer has made its state where activations had been. Those of the next step come to lie otherwise, so what is free
            # of this step's heap would stay beside them.
            trim_heap()
        self._first = False
        if self._settled is not None:
            self._settled.record()
        return StepResult(
            step=number,
            loss=loss,
            lr=float(self.optimizer.param_groups[0]["lr"]) if work.learning_rate is None else work.learning_rate,
            samples=self._role.micro_batches.samples,
            count=work.weights.total,
            seconds=time.perf_counter() - started_s,
            norm=work.grad_norm,
            scale=scale,
            overflow=overflow,
            fault=fault,
        )

    def _told_of_memory(self, number: int | None) -> AbstractContextManager[None]:
        return told_with_stage(
            self.device,
            self.plan,
            self.graph,
            self._role,
            number,
            lambda: "evaluation" if number is None else self._executor.doing,
            lambda: longer_than_planned(self._executor.inputs, self.graph),
        )

    def held(self) -> Held | None:
        """The part of the state after `steps_done` steps that this rank answers for, without asking other ranks; None in the middle of
        an update. From any thread, also while a step waits for others.
        """
        if self._executor.updating:
            return None
        held = self._state.held(self._before)
        return replace(held, state={**held.state, **self._progress()})

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Copies of what is `held` are made beside what the device waits for."""
        if self._settled is None:
            yield
            return
        stream = torch.Stream(self.device)
        stream.wait_event(self._settled)
        with stream:
            yield

    def _fault(self, work: Step, loss: float, statistics: Mapping[str, Tensor]) -> str:
        """What was not finite, found out by all ranks together; statistics that the forward has spoilt become what they were."""
        for name, value in statistics.items():
            self._statistics[name].copy_(value)
        gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None} | self._masters.own_gradients
        weights: dict[str, Tensor] = {**self._parameters, **({} if self._sharded is None else self._sharded.own)}
        own = findings(self.graph, weights, gradients, list(work.losses.values()), self._role.stages)
        return first_fault(self.graph, self._communicator.all_gather_object(own), loss)

    def gradients(self, batch: GlobalBatchLike, step: int = 0) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of a global batch, as `step` would use them before clipping. No weight is updated; running
        statistics of BatchNorm are, as in every forward.

        Idle ranks get the loss and no gradients. The gradients are views, good until the next call.
        """
        loss = self._executor.run(self._work(batch, step), update=False)
        if not self._role.active:
            return loss, {}
        here = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        return loss, here | self._gradients.gather_gradients()

    def evaluate(self, batch: GlobalBatchLike) -> float:
        """The loss on a batch of any size, in eval mode; not a number if nothing in it counts."""
        return self._evaluate(batch)[0]

    def evaluate_sum(self, batch: GlobalBatchLike) -> tuple[float, float]:
        """``(loss times count, count)`` of a batch of any size, in eval mode, spread over the ranks as the plan spreads its batch.

        Both can be added over batches, and their ratio is the mean over the batches, weighted by what the loss counts (tokens where it
        has one denominator that counts them, else samples; a summed loss is averaged over the samples too). 0 and 0 if nothing counts.
        """
        loss, count = self._evaluate(batch)
        return (loss * count if count else 0.0), count

    def _evaluate(self, batch: GlobalBatchLike) -> tuple[float, float]:
        source = self._source(batch, "evaluation")
        if not source.size:
            raise DataError("the batch to evaluate has no samples: leave empty batches out")
        with self._told_of_memory(None), told_with_place(self.module, "evaluation"):
            return evaluate(
                self.module,
                source,
                placement=self.placement,
                rank=self.rank,
                parts=self._parts(source),
                loss_count=self._loss_count,
                gradients=self.graph.opaque is not None,
                control=self._communicator.control,
                sharded=self._sharded,
            )

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer (by parameter name) and step. Collective. Tensors that are held here are the live ones, not copies.

        Ranks that are idle or without samples are given the values of one that trains first. Where devices are unlike, so that they may
        have drifted apart in the last bits, all ranks but one have copies of what that one holds.
        """
        return {**self._state.whole(), **self._progress()}

    def own_state(self) -> dict[str, Any]:
        """The part of `state_dict` that this rank answers for; all parts together are the whole. Collective."""
        return {**self._state.own(), **self._progress()}

    def _progress(self) -> dict[str, Any]:
        scale = {} if self._scale is None else {"loss_scale": self._scale.state_dict()}
        return {"step": self.steps_done, **scale}

    def needs(self, keys: Sequence[str]) -> bool:
        """Whether `load_state_dict` reads on this rank what these keys lead to in a `state_dict`."""
        return self._state.needs(keys)

    def weights(self) -> dict[str, Any]:
        """The whole model's state dict on rank 0, nothing on the others. Collective."""
        return self._state.weights()

    def tensors(self, on: int | None = None) -> dict[str, Tensor]:
        """Every parameter and buffer by name, whole, on one rank or (None) on all. Collective. Tensors that are held here are the
        live ones.
        """
        return self._state.tensors(on)

    def not_finite(self) -> str | None:
        """The first of the trained weights and of the optimizer's state on this rank that is not finite; None if all are."""
        states = state_by_name(self.optimizer, self._masters.updated)
        for name, parameter in self._masters.updated.items():
            held = states.get(name, {})
            for what, value in [("", parameter), *((f"the optimizer's {key} of ", held[key]) for key in held)]:
                if isinstance(value, Tensor) and not all_finite([value]):
                    return f"{what}{name}"
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; a rank may leave out what it does not need. Raises CheckpointError."""
        self._state.load(state)
        self.steps_done = int(state["step"])
        if self._scale is not None and "loss_scale" in state:
            self._scale.load_state_dict(state["loss_scale"])

    def close(self) -> None:
        """Take the hooks off the model, and leave the process groups that this worker made. The communicator stays open."""
        self._gradients.close()
        self._masters.close()
        self._communicator.close()

    @property
    def device(self) -> torch.device:
        return self._communicator.device

    @property
    def precision(self) -> Precision:
        """That this rank computes in."""
        return self._role.precision

    @property
    def runs_compiled(self) -> bool:
        """Whether all that this rank runs of the model is compiled code."""
        return self._stages.runs_compiled

    @property
    def borrowed_bytes(self) -> int:
        """Bytes that are resident in this process, but belong to other ranks."""
        return self._communicator.borrowed_bytes

    @property
    def _role(self) -> RankRole:
        return self.placement.places[self.rank]

    def _work(self, batch: GlobalBatchLike, number: int) -> Step:
        source = self._source(batch, f"step {number + 1}")
        if source.size != self.plan.global_batch_size:
            raise DataError(
                f"the batch has {source.size} samples, the plan was made for {self.plan.global_batch_size}: "
                "pass global batches of that size (a DataLoader leaves out a shorter last one with drop_last=True), or plan again"
            )
        require_none_unfrozen(self.module, self._trained)
        role = self._role
        slices, own = part_statistics(self._loss_count, source, role.spans() if role.last else (), self._buffers)
        # Where the devices of the last stage lie in parts, all of them count the same samples.
        answers = role.answers
        return Step(
            number=number,
            source=source,
            parts=self._parts(source),
            sizes=role.micro_batches.sizes,
            spans={stage: role.spans(stage) for stage in role.stages},
            slices=slices,
            weights=Weights(self._loss_count, own, source.size, self._communicator.control, answers=answers),
            learning_rate=None if self._section is None else learning_rate(self._section, number, self._total_steps),
        )

    def _source(self, batch: GlobalBatchLike, where: str) -> BatchSource:
        source = as_source(batch, self.graph)
        if not isinstance(batch, BatchSource):
            self._values.require(source.samples(0, source.size), 0, where)
            return source
        source = self._values.source(source, where)
        if not self._stages.cut:
            return source
        return OneShape(source, {entry.name: entry.batch_dim for entry in self.graph.inputs})

    def _parts(self, source: BatchSource) -> StageRuntime:
        batch = source.samples(0, 1) if self._stages.cut else None
        if self._watch is None or self._stages.has_parts(batch):
            return self._stages.parts(batch)
        with self._watch.phase("capturing the model for inputs of another shape"):
            return self._stages.parts(batch)

    def _make_optimizer(self, optimizer: OptimizerSection | OptimizerFactory) -> torch.optim.Optimizer:
        """Of the parameters that this rank holds; it may hold none."""
        if isinstance(optimizer, OptimizerSection):
            undecayed = frozenset() if optimizer.decay_norms_and_biases else norms_and_biases(self.module)
            return make_optimizer(optimizer, self._masters.updated, undecayed=undecayed)
        return optimizer_of(optimizer, self._masters.updated, self._parameters)

    def _clipping(self, largest: float) -> Clipping:
        """Collective."""
        if self.ownership.whole:
            return Clipping(self._masters, self._parameters, {}, largest, None)
        counted: dict[str, list[Box]] = {
            name: [()]
            if name in self.ownership.shards
            else [
                inside(self.ownership.box(self.rank, name), box)
                for box, rank in self.ownership.parts(name)
                if rank == self.rank
            ]
            for name in self._parameters
        }
        process_group = self._communicator.process_group(self.placement.active)
        return Clipping(self._masters, self._parameters, counted, largest, process_group)


def _length(of: Range) -> int:
    return of[1] - of[0]


def _loss_scale(placement: Placement, graph: ModelGraph, program: Program) -> LossScale | None:
    """None where nothing is computed in fp16. Raises PlanError where nothing would notice an overflow."""
    narrow = any(role.active and role.precision == "fp16" for role in placement.places)
    if not narrow and not any(p.trainable and p.dtype == "float16" for p in graph.parameters):
        return None
    if not all(any(action.kind == "CLIP" for action in actions) for actions in program.ranks if actions):
        raise PlanError("fp16 needs the norm of the gradient, which tells an overflow: lower the plan with clip=True")
    return LossScale()


def _require_together(
    module: nn.Module, program: Program, cluster: Cluster, communicator: Communicator, *, given: bool
) -> None:
    """``given``: weights come from elsewhere than the module of rank 0."""
    if len(cluster.devices) != communicator.world_size or len(program.ranks) != communicator.world_size:
        raise PlanError(
            f"the cluster has {len(cluster.devices)} devices and the program {len(program.ranks)} ranks, but "
            f"{communicator.world_size} workers were started: start one worker a device"
        )
    backend = cluster.devices[communicator.rank].backend
    if backend != communicator.device.type:
        raise WorkerError(
            f"rank {communicator.rank} runs on {communicator.device}, the cluster's device there is a {backend}: "
            "start the workers in the order of the cluster's devices",
            rank=communicator.rank,
        )
    if communicator.rank == 0 and not given and any(p.is_meta for p in module.parameters()):
        raise WorkerError("rank 0 has a model without weights (meta device): build it with its weights there", rank=0)
