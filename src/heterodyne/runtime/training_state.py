"""What a worker has between its steps: weights, optimizer, averages and the number of steps, as others read and set them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from heterodyne.errors import CheckpointError, PlanError
from heterodyne.runtime.asynchronous import AsynchronousExecutor
from heterodyne.runtime.executor import Executor
from heterodyne.runtime.rank_model import RankModel
from heterodyne.runtime.recapture.script_writes import ScriptWrites
from heterodyne.runtime.same_batch import is_looked_at
from heterodyne.runtime.weights.average import WeightAverage
from heterodyne.runtime.weights.between_steps import Sample

__all__ = ["TrainingState"]

_AVERAGES = "averages"


class TrainingState:
    """The state of a worker.

    Args:
        model: that the worker trains.
        executor: of its steps, one of which may be under way.
        writes: finds what anything but the runtime writes.

    To read or to set it ends a step that is under way, so every rank does it, in the same order, where it is said to be collective.
    """

    def __init__(self, model: RankModel, executor: Executor, writes: ScriptWrites, device: torch.device) -> None:
        self._model = model
        self._executor = executor
        self._writes = writes
        self._device = device
        self.steps_done = 0
        self.averages: list[WeightAverage] = []
        self._loaded: dict[int, WeightAverage] = {}  # those that nobody has asked for yet
        self.before: dict[str, Tensor] = {}
        """Statistics as they were before the step under way."""
        self._settled = None if device.type == "cpu" else torch.Event(device)

    def settle(self) -> None:
        """A step has set all that it sets, once the device comes here."""
        if self._settled is not None:
            self._settled.record()

    def held(self) -> dict[str, Any] | None:
        """The part of the state after `steps_done` steps that this rank answers for, without asking other ranks; None in the middle of
        an update. From any thread, also while a step waits for others.
        """
        if self._executor.updating or self._executor.under_way:
            return None
        return {**self._model.state.held(self.before), **self._progress(), **self._of_averages(WeightAverage.held)}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Copies of what is `held` are made beside what the device waits for."""
        if self._settled is None:
            yield
            return
        stream = torch.Stream(self._device)
        stream.wait_event(self._settled)
        with stream:
            yield

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer (by parameter name) and step. Collective. Tensors that are held here are the live ones, not copies.

        Ranks that are idle or without samples are given the values of one that trains first. Where devices are unlike, so that they may
        have drifted apart in the last bits, all ranks but one have copies of what that one holds.
        """
        with self._brought_together():
            return {**self._model.state.whole(), **self._progress(), **self._of_averages(WeightAverage.state)}

    def own(self) -> dict[str, Any]:
        """The part of `state_dict` that this rank answers for; all parts together are the whole. Collective."""
        with self._brought_together():
            return {**self._model.state.own(), **self._progress(), **self._of_averages(WeightAverage.held)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`; a rank may leave out what it does not need. Raises CheckpointError."""
        step = int(state["step"])
        if not 0 <= step < 2**53:
            raise CheckpointError(f"its step is {step:,}")
        self.finish(checked=False)
        self._model.state.load(state)
        for number, saved in state.get(_AVERAGES, {}).items():
            place = int(number)
            if place >= len(self.averages):
                self._loaded[place] = self._model.average(saved["decay"])
            (self._loaded if place in self._loaded else self.averages)[place].load(saved)
        self.steps_done = step
        self.leave()
        if self._model.scale is not None and "loss_scale" in state:
            self._model.scale.load_state_dict(state["loss_scale"])

    def needs(self, keys: Sequence[str]) -> bool:
        """Whether `load_state_dict` reads on this rank what these keys lead to in a `state_dict`."""
        if keys[0] == _AVERAGES:
            return self._model.average_reads("/".join(keys[3:]))
        return self._model.state.needs(keys)

    def weights(self, on: int | None = 0) -> dict[str, Any]:
        """Return the whole model's state dict on one rank, nothing on the others; None: on all. Collective."""
        with self._brought_together():
            return self._model.state.weights(on)

    def tensors(self, on: int | None = None, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return every parameter and buffer (or those ``names``) by name, whole, on one rank or (None) on all. Collective. Tensors that
        are held here are the live ones.
        """
        with self._brought_together():
            return self._model.state.tensors(on, names)

    def updated(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return trained parameters as the optimizer updates them (in fp32 where the model has 16 bits), whole and on every rank.
        Collective. Tensors that are held here are the live ones.
        """
        with self._brought_together():
            return self._model.state.updated(names)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers to other values, whole and the same on every rank; the optimizer's state stays as it is."""
        with self._writes.excepted():
            self._model.state.put(values)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While the block runs weights may be written, if at its end they are as they were, or were `put`."""
        with self._writes.excepted(), self._model.lent(look=is_looked_at(self.steps_done)):
            yield

    def sample(self) -> Sample:
        """A few values of the weights and buffers that other ranks must have alike. Collective."""
        if self._executor.under_way:  # then no trained weight is on two ranks
            return self._model.sample()
        with self._brought_together():
            return self._model.sample()

    def average(self, decay: float) -> WeightAverage:
        """Keep one more average of the weights: that which was loaded in its place, or one that begins with them as they are."""
        if isinstance(self._executor, AsynchronousExecutor):
            raise PlanError(
                "with predicted weights ('async: predicted') ranks update their parts of the model at different times, so that no average "
                "of the weights is kept: leave 'async' or the average out"
            )
        found = self._loaded.pop(len(self.averages), None) or self._model.average(decay)
        found.decay = decay
        self.averages.append(found)
        return found

    @contextmanager
    def applied(self, average: WeightAverage) -> Iterator[None]:
        """The model has an average in place of its weights while the block runs. Collective as it begins."""
        with self._brought_together(), self.lent(), average.applied():
            yield

    def finish(self, *, checked: bool = True) -> None:
        """End the latest step on all ranks, where the next one would have done so. Collective. ``checked``: raise what is wrong with it."""
        if self._executor.finish(checked=checked):
            self.leave()

    def leave(self) -> None:
        """What is there now is what the runtime has made of it, so that the next step finds what others write."""
        self._model.leave(look=is_looked_at(self.steps_done))
        self._writes.leave()

    def bring_together(self) -> None:
        """Make all copies of a weight what the optimizer has made of it. Collective."""
        self.finish()
        self._model.replaced.take_over()
        with self._writes.excepted():
            self._model.moves.bring_together()

    @contextmanager
    def _brought_together(self) -> Iterator[None]:
        """The same; what writes to weights inside is the runtime."""
        self.bring_together()
        with self._writes.excepted():
            yield

    def _of_averages(self, of: Callable[[WeightAverage], dict[str, Any]]) -> dict[str, Any]:
        averages = {**dict(enumerate(self.averages)), **self._loaded}
        found = {str(number): of(average) for number, average in averages.items()}
        return {_AVERAGES: found} if found else {}

    def _progress(self) -> dict[str, Any]:
        scale = {} if self._model.scale is None else {"loss_scale": self._model.scale.state_dict()}
        return {"step": self.steps_done, **scale}
