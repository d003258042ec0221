"""Obeys the action list of one rank, one action after the other. Nothing else decides what a step does.

F j            the forward of micro-batch j
B j            its backward; the last one completes gradients, whose buckets are launched while it goes on
REDUCE_GRAD k  bucket k is launched now, if it was not yet
CLIP           waits for all buckets, then scales the gradients down to a global norm
STEP           waits for all buckets, then updates
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from heterodyne.plan.program import Action
from heterodyne.runtime.exact.dropout import Draws
from heterodyne.runtime.exact.weighting import Weights
from heterodyne.runtime.forward import Forward
from heterodyne.runtime.gradients import GradientBuckets
from heterodyne.runtime.meeting.communicator import Channel, Pending
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.slices import BatchSource

__all__ = ["Executor", "Step", "Watch"]


class Watch(Protocol):
    """Is told what this rank is doing, so that one that hangs can be told from those that wait for it."""

    def progress(self, state: str) -> None:
        """It begins to compute."""

    def waiting(self, state: str) -> None:
        """It begins to wait for others."""


@dataclass(kw_only=True, eq=False)
class Step:
    """What one step works on, and what comes out of it.

    Args:
        number: the step, which the draws depend on.
        source: the global batch.
        spans: ``(first sample, size)`` of each micro-batch of this rank.
        slices: its inputs, where they had to be read ahead for counting.
        weights: of each micro-batch.
        learning_rate: of this step; None: the optimizer keeps its own.
        losses: of each micro-batch, filled by the forwards.
        grad_norm: filled by CLIP.
    """

    number: int
    source: BatchSource
    spans: Sequence[tuple[int, int]]
    slices: list[Mapping[str, Tensor]] | None
    weights: Weights
    learning_rate: float | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    grad_norm: Tensor | None = None

    def inputs(self, index: int) -> Mapping[str, Tensor]:
        return self.source.samples(*self.spans[index]) if self.slices is None else self.slices[index]


@dataclass(frozen=True, eq=False)
class _Alive:
    """A micro-batch between its forward and its backward."""

    loss: Tensor
    draws: Draws | None


class Executor:
    """Runs steps of one rank.

    Args:
        actions: this rank's list; empty for an idle rank.
        forward: the model.
        gradients: its gradients.
        parameters: the trainable ones.
        optimizer: updates them.
        clip_grad_norm: the global norm that CLIP scales down to; smaller gradients stay as they are.
        control: joins all ranks; carries the loss.
        recorder: notes what happens when.
        watch: is told before each action and each wait; None: nobody watches.
    """

    def __init__(
        self,
        *,
        actions: Sequence[Action],
        forward: Forward,
        gradients: GradientBuckets,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        clip_grad_norm: float,
        control: Channel,
        recorder: Recorder,
        watch: Watch | None = None,
    ) -> None:
        self._actions = tuple(actions)
        self._names = {action: str(action) for action in self._actions}
        self._watch = watch
        self._forward = forward
        self._gradients = gradients
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._clip_grad_norm = clip_grad_norm
        self._control = control
        self._recorder = recorder
        self._last_backward = max((i for i, a in enumerate(self._actions) if a.kind == "B"), default=-1)
        self._alive: dict[int, _Alive] = {}

    def run(self, step: Step, *, update: bool = True) -> float:
        """Do the actions; without ``update`` only those that make gradients. Returns the loss of the global batch.

        The loss travels while the gradients do: sent after the update it would make fast ranks wait for slow ones twice a step.
        """
        self._recorder.begin()
        self._alive.clear()
        self._gradients.begin()
        for place, action in enumerate(self._actions[: self._last_backward + 1]):
            self._do(action, step, last=place == self._last_backward)
        loss, sent = self._send_loss(step)
        for action in self._actions[self._last_backward + 1 :]:
            if update or action.kind not in ("CLIP", "STEP"):
                self._do(action, step, last=False)
        self._wait_for_gradients()
        sent.wait()
        self._turn("between steps")
        self._recorder.end(step.number)
        return loss.item()

    def _do(self, action: Action, step: Step, *, last: bool) -> None:
        if action.kind == "REDUCE_GRAD":
            self._gradients.launch(_index(action))
            return
        # What an action waits for is not part of it.
        weight = step.weights.of(_index(action)) if action.kind == "B" else 0.0
        if action.kind in ("CLIP", "STEP"):
            self._wait_for_gradients()
        self._turn(self._names[action])
        with self._recorder.compute(action):
            if action.kind == "F":
                self._do_forward(_index(action), step)
            elif action.kind == "B":
                self._do_backward(_index(action), weight, last=last)
            elif action.kind == "CLIP":
                step.grad_norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_grad_norm)
            else:
                self._update(step.learning_rate)

    def _wait_for_gradients(self) -> None:
        if self._watch is not None:
            self._watch.waiting("REDUCE_GRAD")
        self._gradients.wait()

    def _turn(self, state: str) -> None:
        if self._watch is not None:
            self._watch.progress(state)

    def _do_forward(self, index: int, step: Step) -> None:
        first, size = step.spans[index]
        draws = self._forward.draws(step.number, range(first, first + size))
        loss = self._forward.loss(step.inputs(index), draws)
        step.losses[index] = loss.detach()
        self._alive[index] = _Alive(loss, draws)

    def _do_backward(self, index: int, weight: float, *, last: bool) -> None:
        alive = self._alive.pop(index)
        if last:
            self._gradients.arm()
        self._forward.backward(alive.loss, weight, alive.draws)

    def _send_loss(self, step: Step) -> tuple[Tensor, Pending]:
        """Start the sum of the weighted losses of all ranks, float64 on the host."""
        step.weights.require_some()
        values = torch.stack([loss.double() for loss in step.losses.values()]).tolist() if step.losses else []
        weights = [step.weights.of(index) for index in step.losses]
        # A micro-batch that counts nothing has no mean: its loss is not a number, and no part of the sum.
        total = sum(weight * value for weight, value in zip(weights, values, strict=True) if weight)
        loss = torch.tensor(total, dtype=torch.float64)
        return loss, self._control.all_reduce(loss)

    def _update(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
        self._optimizer.step()


def _index(action: Action) -> int:
    assert action.index is not None
    return action.index
