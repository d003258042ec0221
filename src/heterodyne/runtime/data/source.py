"""What the runtime asks of training data, whatever it is read from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from heterodyne.runtime.slices import BatchSource

__all__ = ["ByStep", "DataSource"]


class DataSource(Protocol):
    """Training and validation samples of a job, the same on every rank.

    The global batch of a step is a function of the step alone. It hands out samples, so that each rank reads its own.
    """

    @property
    def batch_size(self) -> int:
        """Samples of a training batch."""

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a sample; None where samples are no sequences of one length."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """Return what decides the samples at a step. A run is only continued on data of the same identity."""

    def batch(self, step: int) -> BatchSource:
        """The global batch of a step, counted from 0."""

    def validation_batches(self, samples: int) -> tuple[BatchSource, ...]:
        """At most ``samples`` of the validation samples, always the same; empty without validation."""

    def vocabulary(self) -> int | None:
        """The number of token ids that a model needs; None where that is not known."""

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return what spares a resumed run to read again what came before; None where nothing would. The same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. Without it the data still finds the position, by reading up to it."""

    def close(self) -> None:
        """Stop the processes that read ahead, if there are any."""


class ByStep:
    """The part of a `DataSource` for data that is found by the number of the step: nothing is kept and nothing is open."""

    def vocabulary(self) -> int | None:
        return None

    def state_dict(self) -> Mapping[str, Any] | None:
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state

    def close(self) -> None:
        return
