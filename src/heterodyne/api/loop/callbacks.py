"""Callbacks of a training loop: what is called with its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from heterodyne.runtime.worker import StepResult

if TYPE_CHECKING:
    from heterodyne.api.distributed import Distributed

__all__ = ["Callback"]


class Callback:
    """Called by a `Distributed` on every rank, after what it names; override what is needed.

    A callback that calls the trainer does so on every rank alike.
    """

    def on_step_end(self, trainer: Distributed, result: StepResult) -> None:
        """A step is over."""

    def on_evaluate(self, trainer: Distributed, metrics: Mapping[str, float]) -> None:
        """A validation is over; ``loss`` is among the metrics."""

    def on_save(self, trainer: Distributed, path: Path) -> None:
        """A checkpoint, or the weights, have been written."""
