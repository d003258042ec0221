"""The cut of a model into stages whose slowest one is as fast as can be: Whale's balance between TaskGraphs, on measured costs.

Whale (Jia et al., ATC 2022) gives each TaskGraph devices in proportion to its operations. Here the stages are not given: for places
in a fixed order the model is cut at any of its points such that the largest cost of a stage is least, by dynamic programming
over (places used, point reached). Costs are tables of any kind, so devices and layers may be as unlike as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterodyne.errors import InfeasibleError
from heterodyne.search.tables import Floats
from heterodyne.units import format_bytes

__all__ = ["Cut", "best_cut"]

_LONGER = (1.0, 1.01, 1.03, 1.06, 1.1, 1.15, 1.25)
_CLOSE = 1 + 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """``points``: for each place the first point of its stage, and at the end the last point of all.

    ``longest_s``: the largest cost of a stage or of what goes over a border; ``total_s``: the sum of the costs of the stages.
    """

    points: tuple[int, ...]
    longest_s: float
    total_s: float

    def estimate_s(self, fill: float) -> float:
        """Seconds of a step: that of the slowest stage, and the part ``fill`` of the others' while they fill and drain."""
        return self.longest_s + fill * (self.total_s - self.longest_s)


def best_cut(
    step_s: Sequence[Floats],
    lack_bytes: Sequence[Floats],
    border_s: Sequence[Floats],
    names: Sequence[str],
    *,
    fill: float = 0.0,
) -> Cut:
    """The cut with the least ``estimate_s(fill)``; with ``fill`` 0 the least longest cost, and of those the least total.

    Args:
        step_s, lack_bytes: for each place a table over pairs of points: what a stage costs there, and what it lacks of memory.
        border_s: for each border between two places, by point, what goes over it if it lies there.
        names: what to call the places.

    Raises InfeasibleError if there is no cut in which every stage fits, with what each place lacks in the best one.
    """
    count = step_s[0].shape[0]
    if count - 1 < len(step_s):
        raise InfeasibleError(
            f"{len(step_s)} stages cannot be cut from a model with {count - 2} places to cut it: take fewer stages"
        )
    # Places that are alike have one table.
    alike = {id(own): (own, lack) for own, lack in zip(step_s, lack_bytes, strict=True)}
    allowed = {key: _allowed(*both) for key, both in alike.items()}
    costs = [allowed[id(own)] for own in step_s]
    longest = _least(costs, border_s, largest=True)
    if longest is None:
        raise _too_little(lack_bytes, border_s, names)
    limit = _longest(costs, border_s, longest)
    cuts = []
    for longer in _LONGER if fill > 0 else _LONGER[:1]:
        short = {key: np.where(own <= limit * longer * _CLOSE, own, np.inf) for key, own in allowed.items()}
        within = [short[id(own)] for own in step_s]
        borders = [np.where(own <= limit * longer * _CLOSE, 0.0, np.inf) for own in border_s]
        points = _least(within, borders, largest=False) or longest
        cuts.append(Cut(points=points, longest_s=_longest(costs, border_s, points), total_s=_total(costs, points)))
    return min(cuts, key=lambda cut: cut.estimate_s(fill))


def _allowed(step_s: Floats, lack_bytes: Floats) -> Floats:
    """Infinite where a stage does not fit, or is none."""
    count = len(step_s)
    forward = np.arange(count)[:, None] < np.arange(count)[None, :]
    return np.where(forward & (lack_bytes <= 0), step_s, np.inf)


def _least(costs: Sequence[Floats], border: Sequence[Floats], *, largest: bool) -> tuple[int, ...] | None:
    """The points with the least largest cost, or the least sum; None if every way is infinite. Of equals the first."""
    reached = costs[0][0]
    came: list[Floats] = []
    for own, between in zip(costs[1:], border, strict=True):
        if largest:
            ways = np.maximum(np.maximum(reached, between)[:, None], own)
        else:
            ways = (reached + between)[:, None] + own
        came.append(np.argmin(ways, axis=0).astype(np.float64))
        reached = np.min(ways, axis=0)
    if not np.isfinite(reached[-1]):
        return None
    points = [len(reached) - 1]
    for back in reversed(came):
        points.append(int(back[points[-1]]))
    return (0, *reversed(points))


def _longest(costs: Sequence[Floats], border: Sequence[Floats], points: Sequence[int]) -> float:
    stages = [own[a, b] for own, a, b in zip(costs, points, points[1:], strict=False)]
    return float(max([*stages, *(own[at] for own, at in zip(border, points[1:], strict=False))]))


def _total(costs: Sequence[Floats], points: Sequence[int]) -> float:
    return float(sum(own[a, b] for own, a, b in zip(costs, points, points[1:], strict=False)))


def _too_little(lack: Sequence[Floats], border: Sequence[Floats], names: Sequence[str]) -> InfeasibleError:
    """What each place lacks in the cut in which the one that lacks most lacks least."""
    legal = [_allowed(own, np.zeros_like(own)) for own in lack]
    points = _least(legal, [np.zeros_like(own) for own in border], largest=True)
    assert points is not None  # there are enough points
    short = {
        name: round(own[a, b])
        for name, own, a, b in zip(names, lack, points, points[1:], strict=False)
        if own[a, b] > 0
    }
    return InfeasibleError(
        "no cut into stages fits: in the best one "
        + ", ".join(f"{name} lacks {format_bytes(size)}" for name, size in short.items()),
        shortfalls=short,
    )
