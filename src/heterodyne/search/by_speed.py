"""Shares of devices that work together, by their speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, inf
from typing import Final

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.sharding.causal import causal_sizes
from heterodyne.graph.sharding.dealing import dealt_by_speed
from heterodyne.plan.plan import Pipeline, Stage
from heterodyne.search.predict import with_stages

__all__ = ["causal_shares", "lighter_pipelines", "lighter_shares", "shares_by"]

_ROOM: Final = 0.97  # of its memory, what a device is given that had too little
_FINE: Final = 60
"""Shares are written in about so many parts: finer than that no measurement is."""


def shares_by(rates: Sequence[float]) -> tuple[int, ...]:
    """Small integers in proportion to rates, none of them 0; equal ones where no rate is known.

    >>> shares_by([0.8, 0.4, 0.4])
    (2, 1, 1)
    """
    if not any(rate > 0 for rate in rates):
        return (1,) * len(rates)
    shares = dealt_by_speed(rates, max(_FINE, len(rates)))
    common = gcd(*shares)
    return tuple(share // common for share in shares)


def lighter_shares(
    shares: Sequence[int], used_bytes: Sequence[float], memory_bytes: Sequence[float]
) -> tuple[int, ...] | None:
    """Shares with less for devices that lack memory, and more for others, by their free memory.

    Whale's shift of load from devices that run out of memory (section 4.2). Memory is taken as proportional to the share, which is an
    overestimate, so it may take several rounds. None if there is not enough memory in all.
    """
    fits = [memory / used if used > 0 else inf for used, memory in zip(used_bytes, memory_bytes, strict=True)]
    if min(fits) >= 1:
        return tuple(shares)
    kept = [share * min(1.0, _ROOM * fit) if fit < 1 else float(share) for share, fit in zip(shares, fits, strict=True)]
    given = sum(shares) - sum(kept)
    room = [share * max(0.0, min(_ROOM * fit, 10.0) - 1) for share, fit in zip(shares, fits, strict=True)]
    if sum(room) < given:
        return None
    return shares_by([own + given * free / sum(room) for own, free in zip(kept, room, strict=True)])


def lighter_pipelines(
    pipelines: tuple[Pipeline, ...], used_bytes: Mapping[str, float], cluster: Cluster
) -> tuple[Pipeline, ...] | None:
    """With less on devices that lack memory; None where that does not help."""

    def lighter(_: int, stage: Stage) -> Stage:
        if not stage.sharded:
            return stage
        columns = list(zip(*stage.rows, strict=True))  # devices that have the same parts
        used = [max(used_bytes[device] for device in column) for column in columns]
        memory = [min(cluster.device(device).memory_bytes for device in column) for column in columns]
        regions = []
        for region in stage.regions:
            own = region.layout
            shares = lighter_shares(own.shares, used, memory) if len(own.shares) == len(columns) else None
            regions.append(
                region.model_copy(update={"layout": own.model_copy(update={"shares": shares or own.shares})})
            )
        return stage.model_copy(update={"regions": tuple(regions)})

    changed = tuple(with_stages(pipeline, lighter) for pipeline in pipelines)
    return None if changed == pipelines else changed


def causal_shares(graph: ModelGraph, rates: Sequence[float]) -> tuple[int, ...] | None:
    """Slices of a sequence for devices of these rates under causal attention, where later tokens cost more.

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
