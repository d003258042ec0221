"""Steps that were skipped because loss or gradients were not finite: counted, shown, and so many in a row end the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heterodyne.errors import NumericsError

__all__ = ["SkippedSteps", "require_finite"]


class SkippedSteps:
    """Of one training.

    Args:
        most: so many in a row are let pass.
        say: takes a line for each.
    """

    def __init__(self, most: int, say: Callable[[str], None]) -> None:
        self._most = most
        self._say = say
        self.in_a_row = 0
        self.total = 0

    def note(self, done: int, fault: str | None, *, overflow: bool = False) -> None:
        """A step is over, ``done`` with it; ``fault`` is what was not finite. Raises NumericsError for one too many.

        An ``overflow`` of fp16 finds the scale of the loss: it is counted and told, and ends nothing.
        """
        if fault is None:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += not overflow
        if self.in_a_row > self._most:
            raise NumericsError(f"{self._which(done)} skipped, and nothing was updated: {fault}. {_REMEDY}")
        self._say(f"step {done} was skipped, nothing was updated: {fault}")

    def require_none(self, done: int) -> None:
        """Raises NumericsError if the last step was skipped: the weights have given no finite loss since they were updated last."""
        if self.in_a_row:
            raise NumericsError(f"{self._which(done)} skipped, so the weights are not kept. {_REMEDY}")

    def _which(self, done: int) -> str:
        return f"step {done} was" if self.in_a_row == 1 else f"steps {done - self.in_a_row + 1} to {done} were"


def require_finite(found: Sequence[str | None], done: int) -> None:
    """Raise NumericsError if a rank has found something in its state that is not finite; ``found`` is the same on every rank."""
    named = next((name for name in found if name is not None), None)
    if named is not None:
        raise NumericsError(f"after step {done} {named} is not finite, so this state is not written. {_REMEDY}")


_REMEDY = "Use a smaller optimizer.lr, more optimizer.warmup_steps, or clip_grad_norm, or look for numbers in the data that are not finite"
