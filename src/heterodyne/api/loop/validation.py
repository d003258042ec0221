"""Loss and metrics over all samples of several batches, each counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from heterodyne.api.loop.batches import BatchFormat, BatchLike
from heterodyne.api.loop.prediction import Metric, Predictor
from heterodyne.errors import DataError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.worker import Worker

__all__ = ["validated"]


def validated(
    batches: Iterable[BatchLike],
    metrics: Mapping[str, Metric],
    format: BatchFormat,
    worker: Worker,
    predictor: Predictor,
    communicator: Communicator,
) -> dict[str, float]:
    """``loss`` and the metrics by name; not a number where nothing counts. Collective.

    Raises DataError for a metric that does not return a sum and a count, or is called ``loss``.
    """
    if "loss" in metrics:
        raise DataError("a metric is called 'loss', which is the name of the model's own: call it otherwise")
    total, count = 0.0, 0.0
    sums = dict.fromkeys(metrics, (0.0, 0.0))
    batch: BatchLike | None = None
    for batch in batches:
        named = format.named(batch)
        own, counted = worker.evaluate_sum(named)
        total, count = total + own, count + counted
        for part in predictor.parts(named) if metrics else ():
            given = format.as_given(part.inputs)
            for name, metric in metrics.items():
                more, samples = _pair(name, metric(part.outputs, given))
                before = sums[name]
                sums[name] = (before[0] + more, before[1] + samples)
    if batch is None:
        raise DataError(
            "there are no batches to validate on: the dataset is empty, or its loader leaves out all of it (drop_last)"
        )
    together = torch.tensor(list(sums.values()), dtype=torch.float64)
    if metrics:
        communicator.control.all_reduce(together).wait()
    found = {name: _ratio(*row) for name, row in zip(sums, together.tolist(), strict=True)}
    return {"loss": _ratio(total, count), **found}


def _pair(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise DataError(
            f"the metric {name!r} returned a {type(value).__name__}: let it return the sum over the samples that it is given, and "
            "their count, as a tuple"
        )
    try:
        return float(value[0]), float(value[1])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"the metric {name!r} returned {value!r:.200}: its sum and its count are numbers") from error


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
