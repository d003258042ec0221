"""Obeys the action list of one rank, one action after the other. Nothing else decides what a step does.

What each action means is said in `plan.program`. Sends and reductions are started and left to themselves. CLIP and STEP wait for
all reductions, and a step ends when everything that was sent has left. STEP is left out, on all ranks or on none, if the loss of the
global batch or the norm of its gradient is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heterodyne.plan.lower import Lowered
from heterodyne.plan.program import REDUCTIONS, Action, Program
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.comm.work import Work
from heterodyne.runtime.exact.weighting import Weights, known_loss, weighted_sum
from heterodyne.runtime.liveness.failure_detector import BETWEEN_STEPS
from heterodyne.runtime.liveness.watchdog import Watchdog
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.slices import BatchSource
from heterodyne.runtime.stages.host_link import Readback
from heterodyne.runtime.stages.stage_builder import StageRuntime
from heterodyne.runtime.step_result import LateLoss
from heterodyne.runtime.weights.clipping import Clipping
from heterodyne.runtime.weights.gradients import GradientBuckets
from heterodyne.runtime.weights.loss_scale import LossScale
from heterodyne.runtime.weights.masters import MasterWeights
from heterodyne.runtime.weights.optimizer import decides_on_device
from heterodyne.runtime.weights.outside_moves import OutsideMoves
from heterodyne.runtime.weights.parameter_groups import set_rate
from heterodyne.runtime.weights.sharded_parameters import ShardedParameters

__all__ = ["Executor", "Step"]

_UPDATE = ("CLIP", "STEP", "GATHER")


@dataclass(kw_only=True, eq=False)
class Step:
    """What one step works on, and what comes out of it.

    Args:
        number: the step, which the draws depend on.
        first: the number of its first micro-batch for stages and messages: 0, but for steps that begin while others are under way.
        source: the global batch.
        parts: the stages of this rank, for inputs of its shapes.
        sizes: of each micro-batch of this rank's pipeline.
        spans: for each stage of this rank ``(first sample, count)`` of its slice of each micro-batch.
        slices: the inputs of each micro-batch at the stage that makes the loss, where they had to be read ahead for counting.
        numbers: that stages are given beside their inputs.
        weights: of each micro-batch there.
        learning_rate: of this step; None: the optimizer keeps its own.
        losses: of each micro-batch, filled by the forwards.
        grad_norm: filled by CLIP.
        agreed: whether all ranks run the same model.
        may_be_late: STEP may leave it to the device to decide by the norm; once the loss is there, whether all ranks may.
        late: filled by STEP where it has: the norm on its way to the host.
        skipped: filled by STEP: nothing was updated, since loss or norm is not finite, as far as the host knows; see ``late``.
        unlike: filled when the loss is there: ranks run different models, so nothing was updated.
        stale: filled by STEP: the optimizer has moved weights outside of its step, so that the gradients are those of a mixture, and
            nothing was updated.
    """

    number: int
    source: BatchSource
    parts: StageRuntime
    sizes: Sequence[int]
    spans: Mapping[int, Sequence[tuple[int, int]]]
    slices: Mapping[int, Mapping[str, Tensor]]
    weights: Weights
    first: int = 0
    numbers: Mapping[str, Tensor] = field(default_factory=dict)
    learning_rate: float | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    grad_norm: Tensor | None = None
    agreed: Callable[[], bool] = lambda: True
    may_be_late: bool = False
    late: Readback | None = None
    skipped: bool = False
    unlike: bool = False
    stale: bool = False


class Executor:
    """Runs steps of one rank.

    Args:
        rank: this one.
        lowered: the plan, with the program of all ranks; an idle rank has an empty list.
        loss_stage: the stage of this rank that makes the loss; None: another rank has it.
        gradients: of its parameters.
        weights: what it updates; ``optimizer`` has the learning rate.
        clipping: what CLIP does.
        sharded: the parameters of which it keeps a part; None: it keeps all.
        scale: of the loss; None: it is not scaled.
        moves: of the optimizer, outside of its step.
        control: joins all ranks; carries the loss.
        recorder: notes what happens when.
        watch: is informed before each action and each wait; None: nobody watches.
    """

    def __init__(
        self,
        *,
        rank: int,
        lowered: Lowered,
        loss_stage: int | None,
        gradients: GradientBuckets,
        weights: MasterWeights,
        optimizer: torch.optim.Optimizer,
        clipping: Clipping,
        control: ProcessGroup,
        moves: OutsideMoves,
        sharded: ShardedParameters | None = None,
        scale: LossScale | None = None,
        recorder: Recorder,
        watch: Watchdog | None = None,
    ) -> None:
        self._rank = rank
        self.doing = ""  # the action that is under way, or was last
        self.updating = False  # from the first weight that a step changes until the caller has counted the step
        self.inputs: Mapping[str, Tensor] = {}  # of the latest forward
        self.elements = 0  # of the inputs of all forwards
        self._loss_stage = loss_stage
        self._gradients = gradients
        self._weights = weights
        self._optimizer = optimizer
        self._clipping = clipping
        self._control = control
        self._moves = moves
        self._sharded = sharded
        self._scale = scale
        self._scaled = False
        self._ready: torch.Event | None = None  # when the losses are, on a device
        self._last_norm: Readback | None = None  # of the step before, where the device has decided by it
        self._sums: tuple[Tensor, Work] | None = (
            None  # what all ranks send each other, until it is known whose gradients differ
        )
        self._recorder = recorder
        self._watch = watch
        self.follow(lowered)

    def follow(self, lowered: Lowered) -> None:
        """Run what this plan lowers to from the next step on: that of the same plan, for another graph of the model."""
        self._obey(lowered.program)

    def _obey(self, program: Program) -> None:
        self._program = program
        self._actions = program.ranks[self._rank]
        self._names = [str(action) for action in self._actions]
        # An idle rank has no gradients to look at, so those that have some say so.
        self._tells = any(not actions for actions in program.ranks)
        self._last_pass = max((i for i, a in enumerate(self._actions) if a.kind in ("B", "I", "W")), default=-1)
        # A whole backward completes gradients while it goes on; the halves of one complete them at their end.
        self._last_of_stage = {a.stage: a for a in self._actions if a.kind == "B"}

    def finish(self, *, checked: bool = True) -> bool:  # noqa: ARG002  # there is nothing to check here
        """End what an earlier step has left to do, and return whether there was anything: here each step ends before the next begins.

        ``checked``: raise what is wrong with that step.
        """
        return False

    @property
    def under_way(self) -> bool:
        """Return whether a step has begun that has not ended on all ranks."""
        return False

    def run(self, step: Step, *, update: bool = True) -> float | LateLoss:
        """Do the actions; without ``update`` only those that make gradients. Returns the loss of the global batch.

        The loss travels while the gradients do: sent after the update it would make fast ranks wait for slow ones twice a step.
        When the gradients are there it is there too, so that to look at it before the update costs no wait of its own.

        Raises DataError on all ranks, before anything is sent or expected, for a batch in which nothing counts.
        """
        step.weights.require_some()
        self._recorder.begin()
        ends = () if self._loss_stage is None else step.spans[self._loss_stage]
        step.parts.stages.begin(sum(bool(size) for _, size in ends))
        self._gradients.begin()
        self._scaled = self._scale is not None
        if step.parts.transfers is not None:
            step.parts.transfers.begin(self._program.ranks, step.sizes)
        after = self._last_pass + 1
        for action, name in zip(self._actions[:after], self._names, strict=False):
            self._do(action, name, step)
        loss, sent = self._send_loss(step)
        self._sums = None if self._gradients.same_way else (loss, sent)
        known: list[float] = []
        for action, name in zip(self._actions[after:], self._names[after:], strict=True):
            if action.kind == "STEP" and update:
                self._wait_for_gradients()
                sent.wait()
                known.append(self._known(loss, step))
                step.skipped = not self._is_finite(known[0], step)
            if action.kind not in _UPDATE or (update and not (step.skipped or step.stale or step.unlike)):
                self._do(action, name, step)
        if not known:  # no gradients here, so no STEP
            sent.wait()
            known.append(self._known(loss, step))
        told = self._tell(step) if update and self._tells else None
        self._wait_for_gradients()
        self._gradients.wait_gathered()
        if update and not step.skipped and not step.stale:
            self._weights.settled()
        if step.parts.transfers is not None:
            step.parts.transfers.settle()
        if told is not None:
            told()
        self._turn(BETWEEN_STEPS)
        self._recorder.end(step.number)
        return known[0]

    def _known(self, loss: Tensor, step: Step) -> float:
        """The loss of the global batch, as it has come; on the way, whether model and weights were the same on all ranks."""
        found = known_loss(loss[:2])
        step.unlike = not step.agreed()
        step.stale = not step.unlike and bool(loss[3].item()) and self._moves.settle()
        step.may_be_late = loss[4].item() == len(self._control.ranks)
        step.skipped = False
        return found

    def _tell(self, step: Step) -> Callable[[], None]:
        """Let idle ranks know whether the step was skipped, and the norm of the gradient; to be called when the step ends."""
        first = next(rank for rank, actions in enumerate(self._program.ranks) if actions)
        norm = step.grad_norm if self._rank == first else None
        known = (0.0, 0.0) if norm is None else (1.0, norm.item())
        told = torch.tensor([float(step.skipped), *known], dtype=torch.float64)
        sent = self._control.all_reduce(told)

        def heard() -> None:
            sent.wait()
            skipped, is_known, found = told.tolist()
            step.skipped = bool(skipped)
            if not self._actions and is_known:
                step.grad_norm = torch.tensor(found)

        return heard

    def _do(self, action: Action, name: str, step: Step) -> None:
        """One action. What it waits for is not part of it."""
        self.doing = name
        kind, stage, index = action.kind, action.stage, action.index
        if kind in REDUCTIONS:
            self._gradients.launch(_number(index))
        elif kind == "GATHER":
            self._gradients.gather(_number(index))
        elif kind in ("UNSHARD", "RESHARD"):
            self._shard(action)
        elif kind in _UPDATE:
            self._wait_for_gradients()
            self._turn(name)
            with self._recorder.during(action):
                if kind == "CLIP":
                    step.grad_norm = self._clipping.clip()
                else:
                    self._update(step)
        elif step.spans[stage][_number(index)][1]:  # else this rank has no sample of it
            self._pass(action, name, step, _number(index))

    def _shard(self, action: Action) -> None:
        assert self._sharded is not None  # or its program has no such action
        bucket = _number(action.index)
        if action.kind == "RESHARD":
            self._sharded.reshard(bucket)
            return
        started = self._recorder.now()
        self._recorder.collective(action, started, self._sharded.unshard(bucket, timed=self._recorder.on))

    def _pass(self, action: Action, name: str, step: Step, index: int) -> None:
        stage, kind, stages, number = action.stage, action.kind, step.parts.stages, step.first + index
        if kind in ("RECV_F", "RECV_B"):
            if self._watch is not None:
                self._watch.waiting(name)
            receive = stages.receive_forward if kind == "RECV_F" else stages.receive_backward
            with self._recorder.during(action, "comm"):
                receive(stage, number)
            return
        if kind in ("SEND_F", "SEND_B"):
            send = stages.send_forward if kind == "SEND_F" else stages.send_backward
            send(stage, number)
            return
        if kind in ("OFFLOAD", "RELOAD"):
            move = stages.offload if kind == "OFFLOAD" else stages.reload
            with self._recorder.during(action, "comm"):
                move(stage, number)
            return
        if self._sharded is not None and kind != "W":
            if self._watch is not None:
                self._watch.waiting("UNSHARD")
            self._sharded.wait(stage)
        has_loss = stage == self._loss_stage
        weight = self._weight(step, index) if has_loss and kind in ("B", "I") else 0.0
        weight *= self._scale.value if self._scale is not None else 1.0
        self._turn(name)
        with self._recorder.during(action):
            if kind == "F":
                self._do_forward(stage, index, step)
            elif kind == "R":
                stages.recompute(stage, number)
            elif kind == "W":
                stages.weights(stage, number)
            else:
                if self._last_of_stage.get(stage) is action:
                    self._gradients.begin_last_backward(stage)
                stages.backward(stage, number, weight, half=kind == "I")

    def _weight(self, step: Step, index: int) -> float:
        """Return how much a micro-batch counts in the loss of the batch."""
        return step.weights.of(index)

    def _do_forward(self, stage: int, index: int, step: Step) -> None:
        first, count = step.spans[stage][index]
        inputs = step.slices[index] if stage == self._loss_stage and index in step.slices else None
        if inputs is None:
            inputs = step.source.samples(first, count)
        self.inputs = inputs
        self.elements += sum(tensor.numel() for tensor in inputs.values())
        inputs = {**inputs, **step.weights.divisors, **step.numbers}
        loss = step.parts.stages.forward(stage, step.first + index, inputs, step.number, range(first, first + count))
        if loss is not None:
            step.losses[index] = loss.detach()
            if loss.device.type != "cpu":
                self._ready = torch.accelerator.current_stream(loss.device).record_event(self._ready)

    def _wait_for_gradients(self) -> None:
        if self._watch is not None:
            self._watch.waiting("REDUCE_GRAD")
        differs = False
        if self._sums is not None:
            (sums, sent), self._sums = self._sums, None
            sent.wait()
            differs = bool(sums[2])
        self._gradients.wait(differs=differs)
        if self._scaled and self._scale is not None:
            self._scaled = False
            self._scale.unscale(self._weights.gradients().values())

    def _turn(self, state: str) -> None:
        if self._watch is not None:
            self._watch.progress(state)

    def _send_loss(self, step: Step) -> tuple[Tensor, Work]:
        """Start to add up over all ranks, float64 on the host: what `weighted_sum` gives, how many have gradients of other parameters,
        how many have moved weights outside of a step, and how many may leave the decision before STEP to their device.
        """
        self._turn("reading the losses")
        # As wide as Python's numbers. The device goes on with the backward meanwhile.
        values = Readback(list(step.losses.values()), self._ready).get() if step.losses else []
        weights = [self._weight(step, index) for index in step.losses]
        on_device = step.may_be_late and self._clipping.on_device and decides_on_device(self._optimizer)
        others = float(self._gradients.differs), float(self._moves.told()), float(on_device)
        loss = torch.tensor([*weighted_sum(weights, values), *others], dtype=torch.float64)
        return loss, self._control.all_reduce(loss)

    def _is_finite(self, loss: float, step: Step) -> bool:
        """Return whether the loss and the norm of the gradient are finite. The norm is left to the device where all ranks may, and that
        of the step before was finite: the host need not wait for the backward then, and runs ahead into the next step.
        """
        last, self._last_norm = self._last_norm, None
        norm = step.grad_norm
        if not math.isfinite(loss) or norm is None:
            return math.isfinite(loss)
        if not step.may_be_late or not (last is None or math.isfinite(last.get()[0])):
            return math.isfinite(norm.item())
        step.late = self._last_norm = Readback([norm])
        return True

    def _update(self, step: Step) -> None:
        if step.learning_rate is not None:
            for group in self._optimizer.param_groups:
                set_rate(group, step.learning_rate)
        self.updating = True
        unless = None if step.late is None or step.grad_norm is None else (~step.grad_norm.isfinite()).float()
        self._weights.step(self._optimizer, unless=unless)


def _number(index: int | None) -> int:
    assert index is not None
    return index
