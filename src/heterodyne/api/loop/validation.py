"""Loss and metrics over all samples of several batches, each counted once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from heterodyne.api.loop.batches import BatchFormat, BatchLike
from heterodyne.api.loop.prediction import BatchPredictor, Metric
from heterodyne.errors import DataError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.worker import Worker

__all__ = ["KeptMetric", "validated"]


def validated(
    batches: Iterable[BatchLike],
    metrics: Mapping[str, Metric | KeptMetric],
    format: BatchFormat,
    worker: Worker,
    predictor: BatchPredictor,
    communicator: Communicator,
) -> dict[str, float]:
    """``loss`` and the metrics by name; not a number where nothing counts. Collective.

    Raises DataError for a metric that does not return a sum and a count, or is called ``loss``.
    """
    if "loss" in metrics:
        raise DataError("a metric is called 'loss', which is the name of the model's own: call it otherwise")
    total, count = 0.0, 0.0
    kept = {name: metric for name, metric in metrics.items() if isinstance(metric, KeptMetric)}
    sums = dict.fromkeys((name for name in metrics if name not in kept), (0.0, 0.0))
    batch: BatchLike | None = None
    for batch in batches:
        named = format.named(batch)
        own, counted = worker.evaluate_sum(named)
        total, count = total + own, count + counted
        for part in predictor.parts(named) if metrics else ():
            given = format.as_given(part.inputs)
            for name, metric in metrics.items():
                if isinstance(metric, KeptMetric):
                    metric.update(part.outputs, given)
                    continue
                more, samples = _pair(name, metric(part.outputs, given))
                before = sums[name]
                sums[name] = (before[0] + more, before[1] + samples)
    if batch is None:
        raise DataError(
            "there are no batches to validate on: the dataset is empty, or its loader leaves out all of it (drop_last)"
        )
    together = torch.tensor(list(sums.values()), dtype=torch.float64)
    if sums:
        communicator.control.all_reduce(together).wait()
    found = {name: _ratio(*row) for name, row in zip(sums, together.tolist(), strict=True)}
    found |= {name: metric.value(communicator) for name, metric in kept.items()}
    return {"loss": _ratio(total, count), **{name: found[name] for name in metrics}}


class KeptMetric:
    """A metric that keeps states, as those of torchmetrics: each rank updates it with what it runs, and the states are merged at the end.

    Args:
        of: the metric; it is reset, and has the states of all ranks in the end.
        reads: from ``(outputs, part of the batch)`` to what its ``update`` is called with; None: the outputs, and the last tensor of a
            tuple.

    Raises DataError for one whose states cannot be merged.
    """

    def __init__(self, name: str, of: Any, reads: Callable[[Any, Any], tuple[Any, ...]] | None) -> None:
        means = [of for of in getattr(of, "_reductions", {}).values() if getattr(of, "__name__", "") == "dim_zero_mean"]
        if not hasattr(of, "merge_state") or means:
            raise DataError(
                f"the states of the metric {name!r} ({type(of).__name__}) cannot be merged over the ranks: pass a function "
                "(outputs, batch) -> (sum, count), or take torchmetrics 1.5 or newer and a metric that keeps no means"
            )
        self._name, self._of, self._reads = name, of, reads
        of.reset()

    def update(self, outputs: Any, batch: Any) -> None:
        if self._reads is not None:
            self._of.update(*self._reads(outputs, batch))
        elif isinstance(batch, tuple):
            self._of.update(outputs, batch[-1])
        else:
            raise DataError(
                f"what the metric {self._name!r} reads of a batch that is no tuple is not known: pass it with a function, "
                f"{{{self._name!r}: (metric, lambda outputs, batch: (outputs['logits'], batch['labels']))}}"
            )

    def value(self, communicator: Communicator) -> float:
        """The metric over the samples of all ranks. Collective."""
        own = self._of.metric_state
        states = communicator.all_gather_object(_on(own, torch.device("cpu")))
        self._of.reset()
        before, self._of.sync_on_compute = self._of.sync_on_compute, False
        self._of._to_sync = False
        try:
            for state in states:
                self._of.merge_state(_on(state, self._of.device))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # this rank itself may have updated it with nothing
                return float(self._of.compute())
        except (RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"the metric {self._name!r} has no single number over all ranks ({error})") from error
        finally:
            self._of.sync_on_compute = self._of._to_sync = before


def _on(state: Any, device: torch.device) -> Any:
    if isinstance(state, dict):
        return {name: _on(value, device) for name, value in state.items()}
    return [_on(value, device) for value in state] if isinstance(state, list) else state.detach().to(device)


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
