"""Bytes that hosts send each other in one step: messages between stages, and collectives of gradients and weights.

What the devices of a sharded stage exchange is not counted. Where links are slow, plans keep it inside of hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from heterodyne.cluster.spec import Cluster
from heterodyne.cost.collective import Collectives
from heterodyne.cost.islands import ELEMENTS, shared_out
from heterodyne.cost.routes import Route
from heterodyne.plan.buckets import Bucket
from heterodyne.plan.islands import Range, all_gather, all_reduce, backwards, shares_by_link

__all__ = ["traffic_between_hosts"]

_Pair = tuple[str, str]


def traffic_between_hosts(
    cluster: Cluster,
    collectives: Collectives,
    routes: Sequence[Route],
    buckets: Sequence[Bucket],
    shares: Mapping[str, int] | None,
) -> dict[_Pair, int]:
    """Return the bytes from one host to another, by ``(from, to)``.

    Args:
        shares: of sharded optimizer state, of each device; None: gradients are all-reduced.
    """
    node_of = [device.node for device in cluster.devices]
    found: Counter[_Pair] = Counter()
    for route in routes:
        found[node_of[route.source[0]], node_of[route.destination[0]]] += sum(route.bytes)
    passed: dict[tuple[str, ...], Counter[_Pair]] = {}
    for bucket in buckets:
        if bucket.owners not in passed:
            passed[bucket.owners] = _passed(cluster, collectives, bucket.owners, shares)
        for pair, elements in passed[bucket.owners].items():
            found[pair] += round(bucket.bytes * elements / ELEMENTS)
    return {pair: size for pair, size in found.items() if pair[0] != pair[1] and size}


def _passed(
    cluster: Cluster, collectives: Collectives, owners: Sequence[str], shares: Mapping[str, int] | None
) -> Counter[_Pair]:
    """Return the elements between hosts of what is done with a bucket of `ELEMENTS`."""
    nodes = [cluster.device(owner).node for owner in owners]
    if len(set(nodes)) < 2:
        return Counter()
    parts = [1] * len(owners) if shares is None else [shares[owner] for owner in owners]
    ranges = shared_out(parts)
    over = collectives.over_islands(owners)
    if over is None:
        once = _ring(nodes, ranges)
        return once + once  # for the sums and for the totals
    place_of = {owner: place for place, owner in enumerate(owners)}
    islands = [[place_of[name] for name in island] for island in over.islands]
    if shares is None:
        programs = [all_reduce(islands, ELEMENTS, shares_by_link(over.bandwidths), ELEMENTS)]
    else:
        gather = all_gather(islands, ranges, ELEMENTS, over.bandwidths)
        programs = [backwards(gather), gather]
    found: Counter[_Pair] = Counter()
    for piece in (piece for program in programs for piece in program):
        for transfer in piece.transfers:
            found[nodes[transfer.source], nodes[transfer.target]] += transfer.stop - transfer.start
        for step in (*piece.up, *piece.down):
            for island, of_island in zip(islands, step.ranges, strict=True):
                found += _ring([nodes[place] for place in island], of_island)
    return found


def _ring(nodes: Sequence[str], ranges: Sequence[Range]) -> Counter[_Pair]:
    """Return what a reduce-scatter or all-gather moves: each sends all but its own range to the next."""
    whole = sum(stop - start for start, stop in ranges)
    found: Counter[_Pair] = Counter()
    for source, target, (start, stop) in zip(nodes, [*nodes[1:], nodes[0]], ranges, strict=True):
        found[source, target] += whole - stop + start
    return found
