"""Shares of devices that work on one thing together, by their speeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, inf
from typing import Final

from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.sharding.causal import causal_sizes

__all__ = ["causal_shares", "shares_by", "shares_of"]

_FINE: Final = 60
"""Shares are written in about so many parts: finer than that no measurement is."""


def shares_of(rates: Sequence[float], units: int) -> tuple[int, ...]:
    """Whole numbers that add up to ``units``, at least 1 each, such that the slowest of them is done soonest."""
    shares = [1] * len(rates)
    for _ in range(units - len(rates)):
        shares[min(range(len(rates)), key=lambda i: ((shares[i] + 1) / rates[i] if rates[i] > 0 else inf, i))] += 1
    return tuple(shares)


def shares_by(rates: Sequence[float]) -> tuple[int, ...]:
    """Small whole numbers in proportion to rates, none of them 0; equal ones where no rate is known.

    >>> shares_by([0.8, 0.4, 0.4])
    (2, 1, 1)
    """
    if not any(rate > 0 for rate in rates):
        return (1,) * len(rates)
    shares = shares_of(rates, max(_FINE, len(rates)))
    common = gcd(*shares)
    return tuple(share // common for share in shares)


def causal_shares(graph: ModelGraph, rates: Sequence[float]) -> tuple[int, ...] | None:
    """The slices of a sequence that devices of these rates should take where attention is causal, so that later tokens cost more.

    They are counted in tokens. None where the model has no causal attention, or sequences of several lengths, or rates are unknown.
    """
    attention = [
        op
        for op in graph.ops
        if op.kind == "scaled_dot_product_attention" and op.argument("is_causal") is True and len(op.operands) > 1
    ]
    lengths = {graph.spec(op.operands[0]).shape[-2] for op in attention}
    if len(lengths) != 1 or not any(rate > 0 for rate in rates):
        return None
    (size,) = lengths
    length = int(size(1))
    if not size.is_constant or length < len(rates):
        return None
    within = sum(op.flops_forward(1) + op.flops_backward(1) for op in attention)
    everything = graph.flops_forward()(1) + graph.flops_backward()(1)
    # A kernel that is given the whole sequence computes half of its pairs, and is counted (and measured) as all of them.
    sizes = causal_sizes(
        length, rates, per_token_cost=(everything - within) / length, attention_cost=2 * within / length**2
    )
    return sizes if all(sizes) else None
