"""Forward and backward of one rank's stages, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from heterodyne.model_output import LOSS
from heterodyne.module_outputs import at_samples
from heterodyne.runtime.exact.dropout import Draws
from heterodyne.runtime.stages.deferred import DeferredWeights
from heterodyne.runtime.stages.forward import Forward, on_device
from heterodyne.runtime.stages.hosted import Hosted, HostedStore
from heterodyne.runtime.stages.joint_loss import JointLoss
from heterodyne.runtime.stages.kept_outputs import KeptOutputs
from heterodyne.runtime.stages.recompute import Recomputation
from heterodyne.runtime.stages.segments import Segment
from heterodyne.runtime.stages.transfers import Transfers, as_dtype, dtype_of
from heterodyne.runtime.weights.gradients import GradientBuckets

__all__ = ["Stages"]


@dataclass(eq=False)
class _Alive:
    """A micro-batch of a stage between its forward and the end of its backward.

    ``which``: its stage and number; ``leaves``: what it has received, where its own part of the graph begins; ``made``: what it sends;
    ``joint``: what a loss of all micro-batches reads of it; by name.
    """

    which: tuple[int, int]
    draws: Draws | None
    leaves: dict[str, Tensor]
    made: dict[str, Tensor]
    joint: dict[str, Tensor] = field(default_factory=dict)
    recomputations: list[Recomputation] = field(default_factory=list)
    hosted: list[Hosted] = field(default_factory=list)
    deferred: DeferredWeights | None = None


class Stages:
    """The stages of one rank.

    Args:
        segments: of each stage, in order.
        forward: what surrounds a part of the model while it runs.
        device: of this rank.
        transfers: from and to other ranks; None: there is one stage, and the rank has it all to itself.
        halves: the stages whose backwards come in two halves.
        home: of the gradients of their second halves.
        joint: the end of a loss that compares samples, where this rank has the last stage; None: stages make the loss.
        in_parts: the sharded stages on several devices. These meet in each pass, so they all go the same way through it,
            also where one of them has nothing to receive or no gradient came back to it.
    """

    def __init__(
        self,
        segments: Mapping[int, Sequence[Segment]],
        *,
        forward: Forward,
        device: torch.device,
        transfers: Transfers | None = None,
        halves: frozenset[int] = frozenset(),
        home: GradientBuckets | None = None,
        in_parts: frozenset[int] = frozenset(),
        joint: JointLoss | None = None,
    ) -> None:
        self._in_parts = in_parts
        self._joint = joint
        self._segments = segments
        self._forward = forward
        self._device = device
        self._transfers = transfers
        self._halves = halves
        self._home = home
        self._store = HostedStore(device) if any(s.hosted for of in segments.values() for s in of) else None
        self._alive: dict[tuple[int, int], _Alive] = {}
        # Values on their way to a stage, by micro-batch, and gradients on their way to one, by stage and micro-batch.
        self._values: dict[int, dict[str, Tensor]] = {}
        self._gradients: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._last_reader = {
            value.name: stage for stage in sorted(segments) for segment in segments[stage] for value in segment.receives
        }

    def begin(self, parts: int | None = None) -> None:
        """Forget whatever an earlier step has left. ``parts``: micro-batches of this rank that end in the loss; None: as in evaluation."""
        if self._joint is not None:
            self._joint.begin(parts)
        for hosted in (each for alive in self._alive.values() for each in alive.hosted):
            hosted.close()
        if self._store is not None:
            self._store.settle()
        self._alive.clear()
        self._values.clear()
        self._gradients.clear()

    def receive_forward(self, stage: int, index: int) -> None:
        assert self._transfers is not None
        self._values.setdefault(index, {}).update(self._transfers.receive_forward(stage, index))

    def send_forward(self, stage: int, index: int) -> None:
        assert self._transfers is not None
        self._transfers.send_forward(stage, index, self._alive[stage, index].made)

    def receive_backward(self, stage: int, index: int) -> None:
        assert self._transfers is not None
        self._add(stage, index, self._transfers.receive_backward(stage, index))

    def send_backward(self, stage: int, index: int) -> None:
        """Send the gradients of what the stage has received from elsewhere. There are none while all that comes before it is frozen."""
        assert self._transfers is not None
        if not self._transfers.sends_back(stage):
            return
        leaves = self._alive[stage, index].leaves
        self._transfers.send_backward(stage, index, {name: _gradient(leaf) for name, leaf in leaves.items()})
        self._let_go(stage, index)

    def forward(self, stage: int, index: int, inputs: Mapping[str, Tensor], step: int, samples: range) -> Tensor | None:
        """Run a stage on the inputs of these samples (places in the global batch). Returns the loss, if it ends in it."""
        draws = self._forward.draws(step, samples, self._segments[stage][0].random_before)
        return self._run_forward(stage, index, inputs, draws, samples)

    def _run_forward(
        self, stage: int, index: int, inputs: Mapping[str, Tensor], draws: Draws | None, samples: range
    ) -> Tensor | None:
        inputs = on_device(inputs, self._device)
        at_samples(samples)
        segments = self._segments[stage]
        values = self._values.setdefault(index, {})
        if stage in self._in_parts or not len(samples):
            self._fill(segments, values)
        alive = _Alive((stage, index), draws, self._leaves(segments, values), {})
        local = {**values, **alive.leaves}
        if stage in self._halves and torch.is_grad_enabled():
            alive.deferred = DeferredWeights(self._home)
        with self._forward.around_forward(draws), alive.deferred or nullcontext():
            for segment in segments:
                local.update(self._run(segment, inputs, local, len(samples), alive, to_end=stage in self._in_parts))
            if self._joint is not None and stage == self._joint.stage:
                alive.joint, loss_of_all = self._joint.forward(index, inputs, local, len(samples))
                local.update({} if loss_of_all is None else {LOSS: loss_of_all})
        for segment in segments:
            for value in segment.sends:
                made = alive.made[value.name] = as_dtype(local[value.name], dtype_of(value))
                if self._last_reader.get(value.name, stage) > stage:
                    values[value.name] = made.detach()  # later stages of this rank begin a graph of their own at it
        for name in [name for name in values if self._last_reader[name] == stage]:
            del values[name]
        loss = local.get(LOSS)
        if loss is not None and self._joint is None:
            alive.made[LOSS] = loss
        self._alive[stage, index] = alive
        return loss

    def evaluate(self, stage: int, index: int, inputs: Mapping[str, Tensor], samples: range) -> Tensor | None:
        """Receive, run and send, without a backward to come. Returns the loss, if the stage ends in it."""
        if self._transfers is not None:
            self.receive_forward(stage, index)
        loss = self._run_forward(stage, index, inputs, None, samples)
        if self._transfers is not None:
            self.send_forward(stage, index)
        del self._alive[stage, index]
        return loss

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Segments are in eval mode."""
        runs = [segment.run for segments in self._segments.values() for segment in segments]
        modes = [run.training for run in runs]
        for run in runs:
            run.training, run.evaluating = False, True
        try:
            yield
        finally:
            for run, training in zip(runs, modes, strict=True):
                run.training, run.evaluating = training, False

    def recompute(self, stage: int, index: int) -> None:
        """Compute again what the backward will need."""
        for recomputation in self._alive[stage, index].recomputations:
            recomputation.now()

    def offload(self, stage: int, index: int) -> None:
        """What of it has begun to leave for the host is gone from the device."""
        if self._store is not None:
            self._store.settle((stage, index))

    def reload(self, stage: int, index: int) -> None:
        """Begin to bring all of it back, what the backward will need first at first."""
        for hosted in reversed(self._alive[stage, index].hosted):
            hosted.fetch()

    def backward(self, stage: int, index: int, weight: float, *, half: bool = False) -> None:
        """Add the gradients of a micro-batch to those of the parameters; ``weight``: of its loss, where the stage ends in it.
        ``half``: those of the weights come later, in `weights`.

        A micro-batch of weight 0 has none (its mean loss may not even be a number), unless its samples are part of the statistics
        that other ranks' losses depend on.
        """
        alive = self._alive[stage, index]
        gradients = self._gradients.pop((stage, index), {})
        roots, upstream = [], []
        for name, tensor in alive.made.items():
            if name == LOSS:
                if tensor.requires_grad and (weight or self._forward.mixes_samples):
                    roots.append(tensor)
                    upstream.append(torch.full_like(tensor, weight))
            elif tensor.requires_grad and (name in gradients or stage in self._in_parts):
                roots.append(tensor)
                upstream.append(gradients[name] if name in gradients else torch.zeros_like(tensor))
        if self._joint is not None and stage == self._joint.stage:
            with self._forward.around_backward(alive.draws):
                by_loss = self._joint.backward(index, weight)
            roots += (alive.joint[name] for name in by_loss)
            upstream += by_loss.values()
        for hosted in alive.hosted[-1:]:
            hosted.fetch()
        if roots:
            with self._forward.around_backward(alive.draws):
                torch.autograd.backward(roots, upstream)
        alive.made.clear()
        alive.joint.clear()
        alive.recomputations.clear()
        for hosted in alive.hosted:
            hosted.close()
        alive.hosted.clear()
        self.offload(stage, index)
        if alive.deferred is not None and not half:
            alive.deferred.run()
            alive.deferred = None
        self._hand_back(stage, index, alive)
        if self._transfers is None or not self._transfers.sends_back(stage):
            self._let_go(stage, index)

    def weights(self, stage: int, index: int) -> None:
        """The second half of a backward."""
        deferred = self._alive.pop((stage, index)).deferred
        assert deferred is not None
        deferred.run()

    def _run(
        self,
        segment: Segment,
        inputs: Mapping[str, Tensor],
        local: Mapping[str, Tensor],
        samples: int,
        alive: _Alive,
        *,
        to_end: bool,
    ) -> dict[str, Tensor]:
        received = {value.name: local[value.name] for value in segment.receives}
        if not (segment.recompute or segment.hosted) or not torch.is_grad_enabled():
            return segment.run(inputs, received, samples)
        if segment.hosted:
            return self._run_hosted(segment, inputs, received, samples, alive)
        kept = None if segment.keeps is None else KeptOutputs()
        run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = partial(_on, segment, inputs, samples, kept)
        again = Recomputation(run, received, partial(self._around_again, alive), kept=kept, to_end=to_end)
        alive.recomputations.append(again)
        return again.first()

    def _run_hosted(
        self,
        segment: Segment,
        inputs: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        samples: int,
        alive: _Alive,
    ) -> dict[str, Tensor]:
        assert self._store is not None
        before = alive.hosted[-1] if alive.hosted else None
        run: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = partial(_on, segment, inputs, samples, None)
        hosted = Hosted(run, received, self._store, which=alive.which, weights=self._forward.weights(), before=before)
        alive.hosted.append(hosted)
        return hosted.first()

    @contextmanager
    def _around_again(self, alive: _Alive) -> Iterator[None]:
        # Halves of a backward keep other tensors than a whole one, so the second run must be split as the first one was.
        with self._forward.around_recompute(alive.draws), alive.deferred or nullcontext():
            yield

    def _fill(self, segments: Sequence[Segment], values: dict[str, Tensor]) -> None:
        """No samples, where none came."""
        own = {value.name for segment in segments for value in segment.sends}
        for value in (value for segment in segments for value in segment.receives):
            if value.name not in values and value.name not in own:
                shape = [int(size(0)) for size in value.shape]
                values[value.name] = torch.empty(shape, dtype=getattr(torch, value.dtype), device=self._device)

    def _leaves(self, segments: Sequence[Segment], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What comes from other stages, as the beginnings of a graph."""
        own = {value.name for segment in segments for value in segment.sends}
        return {
            value.name: values[value.name].detach().requires_grad_(value.differentiable and torch.is_grad_enabled())
            for segment in segments
            for value in segment.receives
            if value.name in values and value.name not in own
        }

    def _hand_back(self, stage: int, index: int, alive: _Alive) -> None:
        """Give the gradients of what other stages of this rank have made to them."""
        for maker, segments in self._segments.items():
            if maker == stage:
                continue
            made = {value.name for segment in segments for value in segment.sends}
            back = {n: _gradient(leaf) for n, leaf in alive.leaves.items() if n in made and leaf.requires_grad}
            self._add(maker, index, back)

    def _add(self, stage: int, index: int, gradients: Mapping[str, Tensor]) -> None:
        total = self._gradients.setdefault((stage, index), {})
        for name, gradient in gradients.items():
            total[name] = gradient if name not in total else total[name] + gradient

    def _let_go(self, stage: int, index: int) -> None:
        """The first half, or all, of a backward is over and what it made is on its way."""
        alive = self._alive[stage, index]
        alive.leaves.clear()
        if alive.deferred is None:
            del self._alive[stage, index]


def _on(
    segment: Segment,
    inputs: Mapping[str, Tensor],
    samples: int,
    kept: KeptOutputs | None,
    received: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    if segment.keeps is None:
        return segment.run(inputs, received, samples)
    segment.keeps.tell(kept)
    try:
        return segment.run(inputs, received, samples)
    finally:
        segment.keeps.tell(None)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
