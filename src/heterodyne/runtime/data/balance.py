"""The samples of a global batch in an order in which every contiguous part has its share of the tokens.

A rank takes a contiguous part of the global batch. Where lengths differ, an order by chance gives one rank long samples and
another one short ones. Here the tokens of the first k samples are as near to k mean lengths as a greedy choice gets
them, so a part of any size, at any place, has tokens in proportion to its samples. The order is a function of the lengths
alone and not of the plan: places in the batch, on which dropout masks depend, are the same under every plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["balanced"]


def balanced(lengths: Sequence[int]) -> list[int]:
    """The places of the samples in the new order, a permutation.  # [G] -> [G]

    The tokens of the first k samples differ from k times the mean by at most the largest length: where they are above, there
    is a sample left that is no longer than the mean, where below, one that is no shorter.
    """
    left = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    values = [lengths[place] for place in left]
    mean = sum(lengths) / max(1, len(lengths))
    order: list[int] = []
    given = 0
    while left:
        wanted = mean * (len(order) + 1) - given
        at = bisect_left(values, wanted)
        if at == len(values) or (at and wanted - values[at - 1] <= values[at] - wanted):
            at -= 1
        given += values.pop(at)
        order.append(left.pop(at))
    return order
