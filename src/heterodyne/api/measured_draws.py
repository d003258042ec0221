"""What a model that draws random numbers costs in training: masks that belong to the samples are made by other code than torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from heterodyne.eager import run_eager
from heterodyne.graph.ir import ModelGraph
from heterodyne.measure.block_run import Surroundings
from heterodyne.runtime.exact.dropout import SampleDropout

__all__ = ["MeasuredDraws"]


class MeasuredDraws:
    """Around forwards and backwards that are measured: the draws of the runtime, for samples that are the first ones of a batch."""

    def __init__(self, device: torch.device) -> None:
        self._dropout = SampleDropout(seed=0, device=device)
        self._draws = self._dropout.draws(0, ())

    @classmethod
    def of(cls, graph: ModelGraph, device: torch.device) -> Surroundings | None:
        """None for a model that draws nothing, which runs as it is in training too."""
        return cls(device) if graph.random else None

    @contextmanager
    def forward(self, samples: int) -> Iterator[None]:
        self._draws = self._dropout.draws(0, range(samples))
        with run_eager(), self._dropout.forward(self._draws):
            yield

    @contextmanager
    def backward(self, samples: int) -> Iterator[None]:
        del samples  # those of the forward
        with run_eager(), self._dropout.backward(self._draws):
            yield
