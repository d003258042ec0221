"""Predicted against measured. Predictions are claims, so the error is always reported, with its sign.

error = (predicted - measured) / measured: positive where we promised too much time or memory, negative where too little.
Measured values are medians over the steps, so that one disturbed step does not decide.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from heterodyne.report.run import Run
from heterodyne.report.step_times import MESSAGES, by_rank, kinds_in_order, step_spans
from heterodyne.report.words import unsteady

__all__ = ["Claim", "Comparison", "compare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One number that was predicted and then measured; None for the one that is not known.

    Args:
        what: an action kind, ``wait``, ``step``, ``samples/s``, ``efficiency`` or ``memory``.
        rank: None for what is said of the whole run.
    """

    what: str
    predicted: float | None
    measured: float | None
    unit: Literal["s", "1/s", "bytes", ""]
    rank: int | None = None
    device: str = ""

    @property
    def difference(self) -> float | None:
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted - self.measured

    @property
    def error(self) -> float | None:
        """The relative error; None where a side is not known (an efficiency after unsteady measuring), or 0 was measured."""
        if self.what == "efficiency" and self.measured is not None and unsteady(self.measured):
            return None
        return self.difference / self.measured if self.difference is not None and self.measured else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``run`` holds step time, samples/s and efficiency; ``seconds`` a claim for each rank and kind; ``memory`` one a device."""

    run: tuple[Claim, ...]
    seconds: tuple[Claim, ...]
    memory: tuple[Claim, ...]
    kinds: tuple[str, ...]

    @property
    def step(self) -> Claim:
        return self.run[0]

    def of_rank(self, rank: int) -> tuple[Claim, ...]:
        """The claims on the seconds of a rank, in the order of `kinds`."""
        return tuple(claim for claim in self.seconds if claim.rank == rank)


def compare(run: Run) -> Comparison:
    """Everything that was predicted of a run beside what was measured."""
    seconds, kinds = _seconds(run)
    return Comparison(run=_whole(run), seconds=seconds, memory=_memory(run), kinds=kinds)


def _whole(run: Run) -> tuple[Claim, ...]:
    predicted = run.plan.predicted if run.plan is not None else None
    step_s = predicted.step_s if predicted else None
    if step_s is None and run.simulated is not None and run.simulated.events:
        step_s = statistics.median(step_spans(run.simulated).values())
    measured_s = run.metrics.median("step_s")
    if measured_s is None and run.measured is not None and run.measured.events:
        measured_s = statistics.median(step_spans(run.measured).values())
    return (
        Claim(what="step", predicted=step_s, measured=measured_s, unit="s"),
        Claim(
            what="samples/s",
            predicted=predicted.samples_per_s if predicted else None,
            measured=run.metrics.median("samples_per_s"),
            unit="1/s",
        ),
        Claim(
            what="efficiency",
            predicted=predicted.efficiency if predicted else None,
            measured=run.metrics.median("efficiency"),
            unit="",
        ),
    )


def _seconds(run: Run) -> tuple[tuple[Claim, ...], tuple[str, ...]]:
    predicted = {t.rank: t for t in by_rank(run.simulated)} if run.simulated is not None else {}
    measured = {t.rank: t for t in by_rank(run.measured)} if run.measured is not None else {}
    # How long messages are on their way says little by itself: what counts is who waits for them.
    kinds = tuple(k for k in kinds_in_order([*predicted.values(), *measured.values()]) if k not in MESSAGES)
    claims = tuple(
        Claim(
            what=kind,
            predicted=predicted[rank].seconds(kind) if rank in predicted else None,
            measured=measured[rank].seconds(kind) if rank in measured else None,
            unit="s",
            rank=rank,
            device=run.devices[rank] if rank < len(run.devices) else "",
        )
        for rank in sorted({*predicted, *measured})
        for kind in kinds
    )
    return claims, kinds if claims else ()


def _memory(run: Run) -> tuple[Claim, ...]:
    predicted = run.plan.predicted.memory_bytes if run.plan is not None and run.plan.predicted is not None else {}
    measured = run.peak_memory
    return tuple(
        Claim(
            what="memory",
            predicted=predicted.get(device),
            measured=measured.get(device),
            unit="bytes",
            rank=rank,
            device=device,
        )
        for rank, device in enumerate(run.devices)
        if device in predicted or device in measured
    )
