"""Axes: from values to places between 0 and 1, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["PlotAxis", "axis_of", "round_ticks"]


_NOTHING = 1e-290  # what is smaller cannot be divided into ticks


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotAxis:
    """Values from ``low`` to ``high``, which differ; ticks are between them."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``."""
        return (value - self.low) / (self.high - self.low)


def axis_of(
    values: Iterable[float], *, include: tuple[float, ...] = (), ticks: int = 5, snug: bool = False
) -> PlotAxis:
    """An axis over all finite values and those to ``include``; it ends at ticks, or ``snug`` at the values themselves."""
    finite = [v for v in (*values, *include) if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    size = max(abs(low), abs(high))
    if size < _NOTHING:
        low, high = 0.0, 1.0
    elif high - low <= 1e-9 * size:
        low, high = low - 0.5 * size, high + 0.5 * size
    step = _round_step((high - low) / ticks)
    if not snug:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return PlotAxis(low=low, high=high, ticks=_multiples(step, low, high))


def round_ticks(low: float, high: float, count: int) -> tuple[float, ...]:
    """About ``count`` multiples of 1, 2 or 5 times a power of ten, within ``[low, high]``."""
    return _multiples(_round_step((high - low) / count), low, high)


def _multiples(step: float, low: float, high: float) -> tuple[float, ...]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, not much smaller than ``rough``: a tick too many is better than half of them."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)
