"""How long a slice of the sequence each device takes, where later tokens cost more than earlier ones.

Under a causal mask the token at position t (from 0) attends to t + 1 tokens, so it costs ``per_token_cost + attention_cost * (t + 1)``.
The first t tokens cost the prefix sum C(t) = per_token_cost * t + attention_cost * t (t + 1) / 2, and a device that takes the slice
[a, b) is busy for (C(b) - C(a)) / speed. Slices are contiguous and in the order of the devices: the first ones are the longest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

__all__ = ["causal_sizes"]

_SLACK: Final = 1e-9
"""What rounding may add to a prefix sum, as a part of the time that is aimed at."""


def causal_sizes(
    length: int, speeds: Sequence[float], *, per_token_cost: float, attention_cost: float
) -> tuple[int, ...]:
    """Sizes of the slices of ``length`` tokens, one for each device, for which the slowest device is done soonest.

    Args:
        length: tokens in the sequence.
        speeds: of the devices, in the unit of the costs a second. One without speed gets no tokens.
        per_token_cost: what each token costs wherever it stands, such as the FLOPs of the linear layers. Without a causal mask
            that is all: the attention over the whole sequence belongs to it, and ``attention_cost`` is 0.
        attention_cost: what each token that a token attends to adds.

    No other sizes have a smaller longest time; of those that share it, the borders nearest to where all take equally long.
    Raises ValueError for what cannot be shared out.

    >>> causal_sizes(12, [1, 1], per_token_cost=0, attention_cost=1)
    (8, 4)
    """
    if length < 0 or any(speed < 0 for speed in speeds) or not sum(speeds) > 0:
        raise ValueError(f"{length} tokens cannot be shared out by the speeds {tuple(speeds)}: one must be above 0")
    if per_token_cost < 0 or attention_cost < 0 or not per_token_cost + attention_cost > 0:
        raise ValueError(f"tokens must cost something: {per_token_cost} each and {attention_cost} a token attended to")
    tokens = _Tokens(length, per_token_cost, attention_cost)
    time = _shortest_time(tokens, speeds) * (1 + _SLACK)
    earliest = _earliest_borders(tokens, speeds, time)
    total = sum(speeds)
    borders = [0]
    for speed, so_far, least in zip(speeds, accumulate(speeds), earliest, strict=True):
        even = tokens.nearest(tokens.cost(length) * (so_far / total))
        borders.append(max(min(even, tokens.reach(borders[-1], speed * time)), least))
    return tuple(stop - start for start, stop in pairwise(borders))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The prefix sums of a sequence's costs, and where they pass a value."""

    length: int
    per_token: float
    attention: float

    def cost(self, tokens: int) -> float:
        """C(t): of the first ``tokens``."""
        return self.per_token * tokens + self.attention * (tokens * (tokens + 1) / 2)

    def reach(self, start: int, budget: float) -> int:
        """The last border whose tokens from ``start`` on cost no more than ``budget``."""
        return max(start, bisect_right(range(self.length + 1), self.cost(start) + budget, key=self.cost) - 1)

    def reach_back(self, stop: int, budget: float) -> int:
        """The first border whose tokens up to ``stop`` cost no more than ``budget``."""
        return min(stop, bisect_left(range(self.length + 1), self.cost(stop) - budget, key=self.cost))

    def nearest(self, cost: float) -> int:
        """The border whose prefix sum is nearest to ``cost``."""
        after = min(self.length, bisect_left(range(self.length + 1), cost, key=self.cost))
        before = max(0, after - 1)
        return before if cost - self.cost(before) < self.cost(after) - cost else after


def _shortest_time(tokens: _Tokens, speeds: Sequence[float]) -> float:
    """The least time in which slices of these costs can all be done, in order: by halving, down to neighbouring floats.

    If each device takes as many tokens as it can in a given time, they get furthest; so that alone tells whether it suffices.
    """

    def suffices(time: float) -> bool:
        border = 0
        for speed in speeds:
            border = tokens.reach(border, speed * time)
        return border == tokens.length

    everything = tokens.cost(tokens.length)
    low, high = everything / sum(speeds) * (1 - _SLACK), everything / max(speeds) * (1 + _SLACK)
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _earliest_borders(tokens: _Tokens, speeds: Sequence[float], time: float) -> list[int]:
    """For each device where its slice must end at the earliest, for the later ones to be done in ``time``."""
    borders = [tokens.length]
    for speed in reversed(speeds[1:]):
        borders.append(tokens.reach_back(borders[-1], speed * time))
    return borders[::-1]
