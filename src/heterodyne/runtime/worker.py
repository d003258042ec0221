"""One worker: the model of one rank, trained by obeying the program of a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from heterodyne.errors import DataError
from heterodyne.job import OptimizerSection
from heterodyne.loss_count import LossCount
from heterodyne.plan.lower import Lowered
from heterodyne.plan.placement import RankRole
from heterodyne.plan.precision import Precision
from heterodyne.processes.heap import trim_heap
from heterodyne.runtime.assignment import Assignment
from heterodyne.runtime.asynchronous import AsynchronousExecutor
from heterodyne.runtime.batch_work import BatchWork
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.evaluation import eval_mode, evaluate
from heterodyne.runtime.exact.later_batches import LaterBatches
from heterodyne.runtime.executor import Executor, Step
from heterodyne.runtime.failed_lookups import told_with_place
from heterodyne.runtime.liveness.slowdowns import Slowdowns
from heterodyne.runtime.liveness.watchdog import Watchdog
from heterodyne.runtime.out_of_memory import longer_than_planned, told_with_stage
from heterodyne.runtime.rank_model import RankModel
from heterodyne.runtime.recapture.script_writes import ScriptWrites
from heterodyne.runtime.recapture.variants import Again, Capture, Left, Variant, Variants
from heterodyne.runtime.recapture.variants import Step as StepOfVariant
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.refused_construction import undone_if_refused
from heterodyne.runtime.same_batch import is_looked_at
from heterodyne.runtime.same_ranks import require_together
from heterodyne.runtime.slices import GlobalBatchLike
from heterodyne.runtime.stages.stage_builder import Channels, StageBuilder, StagePrograms
from heterodyne.runtime.step_result import StepResult
from heterodyne.runtime.training_state import TrainingState
from heterodyne.runtime.weights.optimizer import OptimizerFactory, moves_by_itself
from heterodyne.runtime.weights.ownership import Ownership
from heterodyne.runtime.weights.trainable import require_trained
from heterodyne.runtime.weights.unheld import UnheldWeights
from heterodyne.stored_weights import StoredWeights

__all__ = ["OptimizerFactory", "StepResult", "Worker"]


class Worker:
    """The model of one rank.

    Making a worker, `step`, `gradients`, `evaluate` and `state_dict` are collective: every rank calls them, in the same order.

    Args:
        module: the user's model, in the mode (train or eval) in which it shall be trained. It is moved to the device. On rank 0
            with its weights; other ranks get those, so theirs may be on the meta device.
        lowered: who does what, of the plan for the captured model. Ranks are places in the cluster.
        communicator: of this rank, on its device. It stays the caller's to close.
        loss_count: how the losses of the parts of a batch make up the loss of the batch.
        optimizer: a section of a job, or a function that makes an optimizer from parameters (its rate then stays its own); it is given
            ``(name, parameter)`` pairs if its first argument is called ``named_parameters``.
        total_steps: that the schedule of the learning rate stretches over.
        seed: of the dropout masks.
        first_sample: the place in the global batch at which the batch of this worker begins, where that is a part of it.
        clip_grad_norm: the norm to which CLIP scales the gradient down; 0: it is not scaled.
        host_activation_bytes: of activations that this rank has in the memory of its host at a time, as was predicted: there must be room.
        recorder: notes what happens when; None: nothing is noted.
        watch: is informed what this rank is doing (a `Watchdog`); None: nobody is.
        stage_programs: what makes stages of the captured model; only asked by plans that cut it.
        again: captures the model as it is, once the script has changed what forward or loss reads; None: such a change is refused.
        left: places that forward sets in the model and around it.
        compiled: ``torch.compile(module)``, which runs where the module runs as it is; None: the module itself does.
        compile_stages: pieces of the captured model are compiled too.
        stored: where parameters are that no rank has yet; each reads what it holds.
        weights: on rank 0 those of a model without any, by name; None: its module has them, or they are ``stored``.
        say: takes lines for people.

    Raises PlanError if model, program and cluster do not go together, or a host lacks memory for what is kept there; WorkerError if
    ranks have built different models. The model then has no hooks of this library; a plan that cannot cut it leaves it as it was.
    """

    _closing: ExitStack

    @undone_if_refused
    def __init__(
        self,
        module: nn.Module,
        *,
        lowered: Lowered,
        communicator: Communicator,
        loss_count: LossCount,
        optimizer: OptimizerSection | OptimizerFactory,
        total_steps: int,
        seed: int = 0,
        first_sample: int = 0,
        clip_grad_norm: float = 1.0,
        host_activation_bytes: int = 0,
        recorder: Recorder | None = None,
        watch: Watchdog | None = None,
        stage_programs: StagePrograms | None = None,
        again: Again | None = None,
        left: Sequence[Left] = (),
        compiled: Callable[..., object] | None = None,
        compile_stages: bool = False,
        stored: StoredWeights | None = None,
        weights: Iterable[tuple[str, Tensor]] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        given = stored is not None or weights is not None
        require_together(module, lowered, communicator, given=given)
        self.module = module
        self.graph = lowered.graph
        self.plan = lowered.plan
        self._lowered = lowered
        self.rank = communicator.rank
        self.recorder = recorder or Recorder(rank=self.rank, device=communicator.device, on=False)
        self._communicator = communicator = communicator.branch()
        self._closing.callback(communicator.close)
        assignment = Assignment(lowered=lowered, communicator=communicator)
        self.placement = lowered.placement
        section = optimizer if isinstance(optimizer, OptimizerSection) else None
        channels = Channels(communicator)

        def stages_of(capture: Capture, to_do: Assignment) -> StageBuilder:
            return StageBuilder(
                module,
                to_do,
                channels,
                programs=capture.programs,
                home=lambda: held.gradients,
                seed=seed,
                first_sample=first_sample,
                compiled=compiled,
                compile_stages=compile_stages,
                say=say,
            )

        def variant_of(capture: Capture, to_do: Assignment, stages: StageBuilder, *, cut: bool) -> Variant:
            later = LaterBatches(
                module,
                capture.graph,
                capture.loss_count,
                buffers=held.buffers,
                device=communicator.device,
                precision=self._role.precision,
            )
            batches = BatchWork(
                capture.graph,
                stages,
                communicator,
                role=self._role,
                global_batch_size=lowered.plan.global_batch_size,
                loss_count=capture.loss_count,
                buffers=held.buffers,
                section=section,
                total_steps=total_steps,
                watch=watch,
            )
            whole = not cut and held.sharded is None
            return Variant(capture=capture, assignment=to_do, batches=batches, later=later if whole else None)

        def make(capture: Capture, to_do: Assignment) -> Variant:
            stages = stages_of(capture, to_do)
            return variant_of(capture, to_do, stages, cut=is_cut(stages))

        def is_cut(stages: StageBuilder) -> bool:
            # All ranks alike: where one runs the module, it is beside others that run its graph.
            return any(communicator.agreement.gather_or_raise(stages.cut_out))

        def switched(variant: Variant) -> None:
            held.expect(variant.assignment)
            self._executor.follow(variant.assignment.lowered)

        first = Capture(graph=lowered.graph, loss_count=loss_count, programs=stage_programs, left=left)
        stages = stages_of(first, assignment)
        cut = is_cut(stages)
        self._model = held = RankModel(
            module,
            assignment,
            optimizer=optimizer,
            recorder=self.recorder,
            cut=cut,
            host_activation_bytes=host_activation_bytes,
            stored=stored,
            weights=weights,
        )
        self._closing.callback(held.close)
        stages.parts()
        self.runs_compiled = stages.runs_compiled
        """Whether all that this rank runs of the model is compiled code."""
        self._variants = Variants(
            module,
            variant_of(first, assignment, stages, cut=cut),
            make=make,
            again=again,
            writes=ScriptWrites(
                held.whole_everywhere,
                held.ownership.shards.keys() if moves_by_itself(held.optimizer) else (),
                held.optimizer,
                in_parts=held.updates_parts,
            ),
            sample=held.sample,
            replaced=held.replaced,
            switched=switched,
            watch=watch,
            say=say,
        )
        self._say = say
        self._slowdowns = Slowdowns(communicator, self.recorder, [device.id for device in lowered.cluster.devices])
        self._first = True  # no step has been done here
        executor: Callable[..., Executor] = Executor
        if lowered.steady is not None:
            communicator.agreement.gather_or_raise(partial(held.require_predictable, clip_grad_norm))
            executor = partial(
                AsynchronousExecutor, predicted=held.predicted(), disagreement=self._variants.disagreement
            )
        self._executor = executor(
            rank=self.rank,
            lowered=lowered,
            loss_stage=self._role.stages[-1] if self._role.last else None,
            gradients=held.gradients,
            weights=held.masters,
            sharded=held.sharded,
            scale=held.scale,
            optimizer=held.optimizer,
            clipping=held.clipping(clip_grad_norm),
            control=communicator.control,
            moves=held.moves,
            recorder=self.recorder,
            watch=watch,
        )
        self.state = TrainingState(held, self._executor, self._variants.writes, communicator.device)

    def step(self, batch: GlobalBatchLike, step: int | None = None) -> StepResult:
        """Train on one global batch, the same on every rank. ``step`` None: the one after the last.

        The batch is tensors by input name, or hands out samples (`BatchSource`), so that a rank reads only its own.
        Raises DataError for a batch of another size than the plan's, one in which nothing counts, or values that the model cannot look
        up, and CaptureError where it would train nothing.
        """
        started_s = time.perf_counter()
        number = self.steps_done if step is None else step
        same = self._variants.are_same()
        self._model.require_as_left(same=same)
        now = self._variants.step(number, same=same, suspects=self._slowdowns.suspects)
        if now.changed:
            self._slowdowns.reset()
        read = self._executor.elements
        graph = now.variant.capture.graph
        require_trained(graph)
        if self._model.moves.begin():
            self._variants.writes.found_before()
        work = self._work(batch, number, now)
        self.state.before = before = {name: buffer.clone() for name, buffer in self._model.statistics(graph).items()}
        work.may_be_late = self._may_be_late(before)
        with self._told_of_memory(number), told_with_place(self.module, f"step {number + 1}"):
            self._look_at_parts(work, now)
            loss = self._executor.run(work)
            if work.unlike:
                raise self._variants.disagreement()
            if work.stale:
                self._model.moves.spread()
                for name, value in before.items():
                    self._model.buffers[name].copy_(value)
                work = self._work(batch, number, now)
                work.may_be_late = self._may_be_late(before)
                loss = self._executor.run(work)
        scale = None if self._model.scale is None else self._model.scale.value
        fault, overflow = None, False
        if work.skipped:
            assert isinstance(loss, float)  # or nothing is known yet by which a step could be skipped
            fault = self._model.fault(work, loss, before)
            overflow = scale is not None and scale > 1 and math.isfinite(loss)
        if self._model.scale is not None:
            self._model.scale.update(overflow=work.skipped)
            if overflow:
                fault = f"{fault}: fp16 overflows at a loss scale of {scale:g}, the next step has {self._model.scale.value:g}"
        if not self._role.active and fault is None:
            self.optimizer.step()  # of no gradients: schedulers count steps, and here the program has none
        self.state.before = {}
        if fault is None:
            for average in self.state.averages:
                average.update()
        self.state.steps_done = number + 1
        self._model.leave(look=is_looked_at(self.steps_done))
        self._variants.leave()
        self._executor.updating = False
        if self._first and self._communicator.device.type == "cpu":
            # The optimizer has made its state where activations had been. Those of the next step come to lie otherwise, so what is free
            # of this step's heap would stay beside them.
            trim_heap()
        self._first = False
        self.state.settle()
        seconds = time.perf_counter() - started_s
        slower = self._slowdowns.note(number, seconds, self._executor.elements - read, look=now.suspected())
        if slower is not None:
            self._say(f"step {number + 1}: {slower or 'all ranks and links are as fast as in the first steps again'}")
        return StepResult(
            step=number,
            told=loss,
            lr=float(self.optimizer.param_groups[0]["lr"]) if work.learning_rate is None else work.learning_rate,
            samples=self._role.micro_batches.samples,
            count=work.weights.total,
            seconds=seconds,
            norm=work.grad_norm,
            scale=scale,
            overflow=overflow,
            found=fault,
            late=work.late,
            slower=slower,
        )

    def _may_be_late(self, statistics: Mapping[str, Tensor]) -> bool:
        """Return whether the device may decide by the norm whether to update: nothing but weights and optimizer depends on it."""
        active = self._role.active and self.device.type != "cpu"
        return (
            active
            and self._model.scale is None
            and not (statistics or self.state.averages or self._model.masters.on_host)
        )

    def _look_at_parts(self, work: Step, now: StepOfVariant) -> None:
        """Compare parts of this rank's samples with the whole, now and then, and where the model has changed. Raises CaptureError."""
        later, role = now.variant.later, self._role
        if later is None or not (now.changed or is_looked_at(work.number)):
            return
        if now.changed:
            self._communicator.agreement.gather_or_raise(lambda: later.require(work.source, role.spans(), work.number))
        elif role.micro_batches.samples:
            look = later.require_padding if now.variant.capture.graph.opaque is None else later.require
            look(work.source, role.spans(), work.number)

    def _told_of_memory(self, number: int | None) -> AbstractContextManager[None]:
        return told_with_stage(
            self.device,
            self._lowered,
            self.rank,
            number,
            lambda: "evaluation" if number is None else self._executor.doing,
            lambda: longer_than_planned(self._executor.inputs, self.graph),
        )

    def gradients(self, batch: GlobalBatchLike, step: int = 0) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of a global batch, as `step` would use them before clipping. No weight is updated; running
        statistics of BatchNorm are, as in every forward.

        Idle ranks get the loss and no gradients. The gradients are views, good until the next call.
        """
        self._model.require_as_left()
        self.state.bring_together()
        now = self._variants.step(step)
        work = self._work(batch, step, now)
        loss = self._executor.run(work, update=False)
        assert isinstance(loss, float)  # of a step that is flushed
        if work.unlike:
            raise self._variants.disagreement()
        if not self._role.active:
            return loss, {}
        here = {name: p.grad for name, p in self._model.parameters.items() if p.grad is not None}
        return loss, here | self._model.gradients.gather_gradients()

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
        self.state.bring_together()
        with eval_mode(self.module):
            variant, numbers = self._variants.evaluation()
            batches = variant.batches
            source = batches.source(batch, "evaluation")
            if not source.size:
                raise DataError("the batch to evaluate has no samples: leave empty batches out")
            with self._told_of_memory(None), told_with_place(self.module, "evaluation"):
                found = evaluate(
                    self.module,
                    source,
                    placement=self.placement,
                    rank=self.rank,
                    parts=batches.parts(source),
                    loss_count=variant.capture.loss_count,
                    gradients=self.graph.opaque is not None,
                    control=self._communicator.control,
                    numbers=batches.given(numbers),
                    sharded=self._model.sharded,
                )
        variant.capture.guard(self.module)
        variant.capture.follow(self.module)
        return found

    def unheld(self, named: Callable[[str], str]) -> UnheldWeights:
        """Guard what not every rank holds whole until that is released; ``named``: what the user calls a parameter of `module`."""
        return UnheldWeights(
            self.module,
            self.ownership,
            self.placement,
            named,
            optimizer=self.optimizer,
            moves=self._model.moves if moves_by_itself(self.optimizer) else None,
            replaced=lambda: self._model.replaced.count,
            rank=self.rank,
            device=self.device,
        )

    def weights_moved(self) -> bool:
        """Whether weights were changed since this was asked last, by a step or by anything else. Collective."""
        return self._model.weights_moved()

    def require_as_left(self) -> None:
        """Raise PlanError if weights were changed since the last step in a way that the next one would not see."""
        self._model.replaced.take_over()
        self._model.require_as_left()

    def lowered(self, *, training: bool | None) -> Lowered:
        """Return what a step (``training``) or an evaluation would run now, None: what the latest step ran. Collective unless None. Raises
        PlanError for a change of the model that cannot be followed."""
        if training is None:
            return self._variants.running.assignment.lowered
        self.state.bring_together()
        self._variants.asked_for()
        if training:
            now = self._variants.step(self.steps_done)
            if not now.agreed():
                raise self._variants.disagreement()
            return now.variant.assignment.lowered
        with eval_mode(self.module):
            return self._variants.evaluation()[0].assignment.lowered

    @property
    def steps_done(self) -> int:
        """The steps after which the model is as it is."""
        return self.state.steps_done

    @property
    def slowdowns(self) -> Slowdowns:
        """Of the ranks and links."""
        return self._slowdowns

    def close(self) -> None:
        """Take the hooks off the model, and leave the process groups that this worker made. The communicator stays open."""
        self._closing.close()

    def not_finite(self) -> str | None:
        """The first of the trained weights and of the optimizer's state on this rank that is not finite; None if all are."""
        return self._model.not_finite()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of what this rank updates; it may be nothing."""
        return self._model.optimizer

    @property
    def loss_count(self) -> LossCount:
        """How the losses of the parts of a batch made up that of the batch in the latest step."""
        return self._variants.running.capture.loss_count

    @property
    def ownership(self) -> Ownership:
        """Who holds which weights."""
        return self._model.ownership

    @property
    def device(self) -> torch.device:
        return self._communicator.device

    @property
    def precision(self) -> Precision:
        """That this rank computes in."""
        return self._role.precision

    @property
    def borrowed_bytes(self) -> int:
        """Bytes that are resident in this process, but belong to other ranks."""
        return self._communicator.borrowed_bytes

    def _work(self, batch: GlobalBatchLike, number: int, now: StepOfVariant) -> Step:
        work = now.variant.batches.step(batch, number, now.numbers)
        work.agreed = now.agreed
        return work

    @property
    def _role(self) -> RankRole:
        return self.placement.places[self.rank]
