"""A quantity as a function of the micro-batch size, drawn through a few measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Curve"]

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """Non-decreasing, piecewise linear between its points, affine beyond the last two, 0 at size 0.

    Below the first point it follows the first two, but never falls under the line through the origin: a measured curve
    that bends upwards would otherwise promise work for nothing. One point alone means: in proportion to the size.
    """

    points: tuple[Point, ...]

    @classmethod
    def fit(cls, samples: Iterable[Point]) -> Curve:
        """The non-decreasing curve nearest to the samples (isotonic least squares, by pooling adjacent violators).

        A larger micro-batch never takes less time; where a measurement says so it is noise, and the mean of the two is the
        better estimate. Raises ValueError without samples, and for a size that is given twice, not positive, or has a negative value.
        """
        ordered = _ordered(samples)
        pools: list[tuple[float, int]] = []  # (mean, how many)
        for _, value in ordered:
            mean, count = value, 1
            while pools and pools[-1][0] > mean:
                before, many = pools.pop()
                mean, count = (before * many + mean * count) / (many + count), many + count
            pools.append((mean, count))
        values = [mean for mean, count in pools for _ in range(count)]
        return cls(tuple((size, value) for (size, _), value in zip(ordered, values, strict=True)))

    @classmethod
    def envelope(cls, samples: Iterable[Point]) -> Curve:
        """The least non-decreasing curve that is nowhere below a sample: for memory, never promised too low. Raises as `fit`."""
        highest, points = 0.0, []
        for size, value in _ordered(samples):
            highest = max(highest, value)
            points.append((size, highest))
        return cls(tuple(points))

    @property
    def sizes(self) -> tuple[float, ...]:
        return tuple(size for size, _ in self.points)

    def __call__(self, size: float) -> float:
        points = self.points
        if size <= 0:
            return 0.0
        first_size, first_value = points[0]
        place = bisect_left(points, (size, float("-inf")))
        if place < len(points) and points[place][0] == size:
            return points[place][1]
        if len(points) == 1:
            return first_value * size / first_size
        low, high = points[max(0, min(place, len(points) - 1) - 1)], points[max(1, min(place, len(points) - 1))]
        slope = (high[1] - low[1]) / (high[0] - low[0])
        value = low[1] + slope * (size - low[0])
        return max(value, first_value * size / first_size) if place == 0 else value


def _ordered(samples: Iterable[Point]) -> list[Point]:
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("a curve needs at least one sample")
    for (size, value), (following, _) in zip(ordered, [*ordered[1:], (float("inf"), 0.0)], strict=True):
        if size <= 0 or value < 0 or size == following:
            raise ValueError(f"sizes must be positive and different, values not negative: {ordered}")
    return ordered
