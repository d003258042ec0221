"""Steps that are not flushed: each begins while the step before it is still on its way back through the pipeline.

A call of `run` does what `heterodyne.plan.schedules.asynchronous.steady` has of a rank: the forwards of its batch, and backwards of this
batch and of the one before. Forwards that run before the update of the batch before read predicted weights, and their backwards the same
ones. The loss of a step is known while the next one runs. `finish` ends the latest step where no other follows at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from heterodyne.errors import NumericsError
from heterodyne.plan.lower import Lowered
from heterodyne.plan.program import Action, Program
from heterodyne.plan.schedules.asynchronous import drained
from heterodyne.runtime.executor import Executor, Step
from heterodyne.runtime.liveness.failure_detector import BETWEEN_STEPS
from heterodyne.runtime.step_result import LateLoss
from heterodyne.runtime.weights.parameter_groups import options_of, set_rate
from heterodyne.runtime.weights.predicted import PredictedWeights

__all__ = ["AsynchronousExecutor"]


class _UnderWay:
    """A step between its first forward and the check of its loss.

    Args:
        ahead: micro-batches whose forward ran with predicted weights, and whose backward did not run yet.
        options: of the groups of the optimizer, as the script had them when it began.
        trained: whether the script trained each parameter then.
    """

    def __init__(self, step: Step, options: list[dict[str, Any]], trained: list[bool]) -> None:
        self.step, self.options, self.trained = step, options, trained
        self.ahead: set[int] = set()
        self.back = 0  # samples whose backward has run
        self.updated = False
        self.loss: LateLoss | None = None


class AsynchronousExecutor(Executor):
    """Runs asynchronous steps of one rank.

    Args:
        predicted: its weights.
        disagreement: makes what is raised where ranks run different models. Collective.

    The other arguments are those of `Executor`.
    """

    def __init__(
        self, *, lowered: Lowered, predicted: PredictedWeights, disagreement: Callable[[], Exception], **others: Any
    ) -> None:
        self._predicted, self._disagreement = predicted, disagreement
        self._before: _UnderWay | None = None
        self._latest: _UnderWay | None = None
        self._summed: _UnderWay | None = None  # whose gradients are added up
        super().__init__(lowered=lowered, **others)

    def follow(self, lowered: Lowered) -> None:
        """Run what this plan lowers to from the next step on. Collective."""
        self.finish()
        assert lowered.steady is not None
        self._flushed = lowered.program
        self._steady = lowered.steady
        self._drained = Program(ranks=tuple(map(drained, lowered.steady.ranks)))
        self._obey(self._steady)
        self._lags = any(a.index is not None and a.index < 0 for a in self._actions)

    def run(self, step: Step, *, update: bool = True) -> float | LateLoss:
        """Begin a step, and end the one before. Without ``update`` the step is flushed, and makes gradients only.

        Raises DataError on all ranks for a batch in which nothing counts, NumericsError if the loss of the step before was not finite.
        """
        if not update:
            self.finish()
            self._obey(self._flushed)
            try:
                return super().run(step, update=False)
            finally:
                self._obey(self._steady)
        if self._latest is not None and self._latest.step.parts is not step.parts:
            self.finish()
        self._before = self._latest
        step.first = 0 if self._before is None else self._before.step.first + len(step.sizes)
        rate, groups = step.learning_rate, self._optimizer.param_groups
        options = [{**options_of(group), "lr": float(group["lr"]) if rate is None else rate} for group in groups]
        self._latest = _UnderWay(step, options, [p.requires_grad for p in self._predicted.parameters])
        # Schedulers of the script ask for it, and some ranks update only in the next call.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self._recorder.begin()
        if self._before is None:
            step.parts.stages.begin()
        self._go_through(self._steady, step)
        loss = self._latest.loss = LateLoss(*self._send_loss(step))
        self._turn(BETWEEN_STEPS)
        self._recorder.end(step.number)
        if self._before is not None:
            self._require_good(self._before)
        step.weights.require_some()
        return loss

    def finish(self, *, checked: bool = True) -> bool:
        """End the latest step; return whether there was one that had not ended. Collective. ``checked``: raise what is wrong with it."""
        last = self._latest
        if last is None:
            return False
        self._before, self._latest = last, None
        following = replace(last.step, first=last.step.first + len(last.step.sizes))
        self._go_through(self._drained, following)
        if last.step.parts.transfers is not None:
            last.step.parts.transfers.settle()
        self._before = self._summed = None
        self._predicted.clear()
        self.updating = False
        self._turn(BETWEEN_STEPS)
        if checked:
            self._require_good(last)
        return True

    @property
    def under_way(self) -> bool:
        """Return whether a step has begun and not ended on all ranks."""
        return self._latest is not None

    def _go_through(self, program: Program, step: Step) -> None:
        if step.parts.transfers is not None:
            step.parts.transfers.begin(program.ranks, step.sizes, first=step.first)
        for action in program.ranks[self._rank]:
            self._do(action, str(action), step)

    def _do(self, action: Action, name: str, step: Step) -> None:
        """One action, of the step that it belongs to; nothing if that is none."""
        if self._program is self._flushed:
            super()._do(action, name, step)
            return
        behind = self._lags if action.index is None else action.index < 0
        own = self._before if behind else self._latest
        if own is None:
            return
        if action.index is None:
            self._summed = None
            with self._with_options_of(own):
                super()._do(action, name, own.step)
            self._weights.settled()
            own.updated = True
            return
        super()._do(replace(action, index=action.index % len(own.step.sizes)), name, own.step)

    def _pass(self, action: Action, name: str, step: Step, index: int) -> None:
        if self._program is self._flushed:
            super()._pass(action, name, step, index)
            return
        own = self._latest if self._latest is not None and self._latest.step is step else self._before
        assert own is not None
        kind, number = action.kind, step.number
        if kind == "F" and own is self._latest and self._before is not None and not self._before.updated:
            if not self._predicted.has(number):
                before = self._before
                self._predicted.predict(number, before.options, before.back / sum(before.step.sizes))
            own.ahead.add(index)
        ahead = index in own.ahead and kind in ("F", "R", "B")
        with (
            self._trained_as(own.trained) if kind in ("R", "B") else nullcontext(),
            self._predicted.in_place(number) if ahead else nullcontext(),
        ):
            if kind == "B" and self._summed is not own:
                self._gradients.begin()
                self._summed = own
            super()._pass(action, name, step, index)
        if kind == "B":
            own.back += step.sizes[index]
        if kind == "B" and ahead:
            own.ahead.discard(index)
            if not own.ahead:
                self._predicted.release(number)

    @contextmanager
    def _trained_as(self, trained: Sequence[bool]) -> Iterator[None]:
        """The parameters that the script has frozen since a step began are trained, as they were in it."""
        changed = [
            (p, was) for p, was in zip(self._predicted.parameters, trained, strict=True) if p.requires_grad != was
        ]
        for parameter, was in changed:
            parameter.requires_grad_(was)
        try:
            yield
        finally:
            for parameter, was in changed:
                parameter.requires_grad_(not was)

    def _weight(self, step: Step, index: int) -> float:
        # Ranks that do not make the loss learn at the end of the step that nothing counts, and wait for messages until then.
        return super()._weight(step, index) if step.weights.is_defined else 0.0

    @contextmanager
    def _with_options_of(self, own: _UnderWay) -> Iterator[None]:
        """The optimizer has the options that the script had given it when a step began; where a job gives the rates, its own is left."""
        groups, rate = self._optimizer.param_groups, own.step.learning_rate
        now = [{**options_of(group), "lr": float(group["lr"]) if rate is None else rate} for group in groups]
        _give(groups, own.options)
        yield
        _give(groups, now)

    def _require_good(self, ended: _UnderWay) -> None:
        """Raise NumericsError, on all ranks, if the loss of a step was not finite: weights were updated by it."""
        assert ended.loss is not None
        loss = ended.loss.get()
        if not ended.step.agreed():
            raise self._disagreement()
        if not math.isfinite(loss):
            error = NumericsError(
                f"step {ended.step.number + 1}: the loss is {loss}, and with predicted weights ('async: predicted') the update by it is "
                "made before that is known. Resume from the newest checkpoint with a smaller learning rate, or without 'async', where such "
                "steps are skipped"
            )
            error.shared = True
            raise error


def _give(groups: Sequence[dict[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
    """Give parameter groups these options."""
    for group, own in zip(groups, options, strict=False):  # groups may have been added
        set_rate(group, own["lr"])
        group.update({key: value for key, value in own.items() if key != "lr"})
