"""What a loop of one's own does with a moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from heterodyne.api.loop.batches import BatchLike
from heterodyne.api.loop.calls import Calls
from heterodyne.arguments import checked_arguments

if TYPE_CHECKING:
    from heterodyne.api.distributed import Distributed

__all__ = ["Average"]

_WITH_AVERAGE = frozenset({"evaluate()", "validate()", "predict()", "save_pretrained()", "average.state_dict()"})


class Average:
    """An exponential moving average of the weights of a trainer; see `Distributed.average`. Every rank makes the same calls.

    Args:
        applied: a context manager in which the model of this rank has the average.
        whole: the state dict of the model as it is now, on every rank.
    """

    def __init__(
        self,
        trainer: Distributed,
        calls: Calls,
        applied: Callable[[], Any],
        whole: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._trainer = trainer
        self._calls = calls
        self._applied = applied
        self._whole = whole

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The trainer has the average in place of the weights while the block runs, for evaluate, validate, predict and save_pretrained.

        Other calls of the trainer are refused in the block.
        """
        with self._calls.named("average.applied()"):
            held = self._applied()
            held.__enter__()
        try:
            with self._calls.block("'with average.applied()'", _WITH_AVERAGE):
                yield
        finally:
            with self._calls.named("average.applied()"):
                held.__exit__(None, None, None)

    def evaluate(self, batch: BatchLike) -> float:
        """Return what `Distributed.evaluate` returns with the average."""
        with self.applied():
            return self._trainer.evaluate(batch)

    @checked_arguments
    def validate(self, batches: Iterable[BatchLike], metrics: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Return what `Distributed.validate` returns with the average."""
        with self.applied():
            return self._trainer.validate(batches, metrics)

    @checked_arguments
    def predict(self, batch: BatchLike, *, on: Literal["all", "rank0"] = "all") -> Any:
        """Return what `Distributed.predict` returns with the average."""
        with self.applied():
            return self._trainer.predict(batch, on=on)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the model with averaged parameters and its buffers as they are, whole and copied, on every rank."""
        with self.applied(), self._calls.named("average.state_dict()"):
            return {name: v.clone() if isinstance(v, Tensor) else v for name, v in self._whole().items()}
