"""How long a slice of the sequence each device takes, where later tokens cost more than earlier ones.

Under a causal mask a device that has the queries [a, b) of a sequence needs the keys [0, b), and computes attention between all of
both (`heterodyne.runtime.split.team.Members.attention`). So its slice costs (b - a) * (per_token_cost + attention_cost * b), and it is busy
for that divided by its speed. Slices are contiguous and in the order of the devices: the first ones are the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, sqrt
from typing import Final

__all__ = ["causal_sizes"]

_SLACK: Final = 1e-9
"""What rounding may add to a cost, as a part of the time that is aimed at."""


def causal_sizes(
    length: int, speeds: Sequence[float], *, per_token_cost: float, attention_cost: float
) -> tuple[int, ...]:
    """Sizes of the slices of ``length`` tokens, one for each device, for which the slowest device is done soonest.

    Args:
        length: tokens in the sequence.
        speeds: of the devices, in the unit of the costs a second. One without speed gets no tokens.
        per_token_cost: what each token costs wherever it stands, such as the FLOPs of the linear layers. Without a causal mask
            that is all: the attention over the whole sequence belongs to it, and ``attention_cost`` is 0.
        attention_cost: what each pair of a query and a key costs.

    No other sizes have a smaller longest time; of those that share it, borders near to where all take equally long.
    Raises ValueError for what cannot be shared out.

    >>> causal_sizes(12, [1, 1], per_token_cost=0, attention_cost=1)
    (7, 5)
    """
    if length < 0 or any(speed < 0 for speed in speeds) or not sum(speeds) > 0:
        raise ValueError(f"{length} tokens cannot be shared out by the speeds {tuple(speeds)}: one must be above 0")
    if per_token_cost < 0 or attention_cost < 0 or not per_token_cost + attention_cost > 0:
        raise ValueError(f"tokens must cost something: {per_token_cost} each and {attention_cost} a pair of them")
    slices = _Slices(length, per_token_cost, attention_cost)
    even = slices.even_borders(speeds)
    time = slices.shortest_time(speeds) * (1 + _SLACK)
    earliest = slices.earliest_borders(speeds, time)
    borders = [0]
    for speed, wanted, least in zip(speeds, even, earliest, strict=True):
        borders.append(max(min(wanted, slices.reach(borders[-1], speed * time)), least))
    return tuple(stop - start for start, stop in pairwise(borders))


@dataclass(frozen=True, slots=True)
class _Slices:
    """Costs of slices, and how far they go."""

    length: int
    per_token: float
    attention: float

    def cost(self, start: float, stop: float) -> float:
        return (stop - start) * (self.per_token + self.attention * stop)

    def border(self, start: float, budget: float) -> float:
        """Return where a slice from ``start`` on costs ``budget``: the positive root of its quadratic, written so that nothing cancels."""
        first = self.per_token + self.attention * start
        divisor = first + sqrt(first * first + 4 * self.attention * budget)
        return start + 2 * budget / divisor if divisor else start

    def reach(self, start: int, budget: float) -> int:
        """The last border whose tokens from ``start`` on cost no more than ``budget``."""
        stop = max(start, min(self.length, floor(self.border(start, budget)) + 1))
        while stop > start and self.cost(start, stop) > budget:
            stop -= 1
        return stop

    def even_borders(self, speeds: Sequence[float]) -> list[int]:
        """The borders nearest to those at which all would take equally long, if tokens could be divided."""

        def after(time: float) -> list[float]:
            borders = [0.0]
            for speed in speeds:
                borders.append(self.border(borders[-1], speed * time))
            return borders[1:]

        low, high = self._bounds(speeds)
        while low < (middle := (low + high) / 2) < high:
            low, high = (low, middle) if after(middle)[-1] >= self.length else (middle, high)
        return [min(self.length, round(border)) for border in after(high)]

    def shortest_time(self, speeds: Sequence[float]) -> float:
        """The least time in which whole slices can all be done: by halving, down to neighbouring floats.

        If each device takes as many tokens as it can in a given time, they get furthest; so that alone tells whether it suffices.
        """

        def suffices(time: float) -> bool:
            border = 0
            for speed in speeds:
                border = self.reach(border, speed * time)
            return border == self.length

        low, high = self._bounds(speeds)
        while low < (middle := (low + high) / 2) < high:
            low, high = (low, middle) if suffices(middle) else (middle, high)
        return high

    def earliest_borders(self, speeds: Sequence[float], time: float) -> list[int]:
        """For each device where its slice must end at the earliest, for the later ones to be done in ``time``."""
        borders = [self.length]
        for speed in reversed(speeds[1:]):
            stop = borders[-1]
            each = self.per_token + self.attention * stop
            start = max(0, ceil(stop - speed * time / each) - 1) if each else 0
            while start < stop and self.cost(start, stop) > speed * time:
                start += 1
            borders.append(start)
        return borders[::-1]

    def _bounds(self, speeds: Sequence[float]) -> tuple[float, float]:
        """Times of which the one may not suffice, and the other one does: the fastest alone."""
        return 0.0, self.cost(0, self.length) / max(speeds) * (1 + _SLACK)
