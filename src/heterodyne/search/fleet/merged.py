"""Pools that differ only in their place within a zone, merged: fewer pools make the search faster, and its result stays valid.

The nodes of a merged pool are as far from each other as those of two of its pools, so no link is assumed faster than it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from heterodyne.cluster.fleet import Fleet, Pool, Wire

__all__ = ["merged"]


def merged(fleet: Fleet) -> Fleet:
    """The fleet with alike pools of one place merged; links and prices between places are kept. Pools that are not connected stay apart."""
    groups: dict[object, list[Pool]] = {}
    for pool in fleet.pools:
        alike = (pool.kind, pool.devices_per_node, pool.memory_bytes, pool.inside, pool.place[:-1], pool.backend)
        price = (pool.usd_per_device_hour, pool.spot, pool.watts_per_device)
        groups.setdefault((alike, price) if pool.place else pool.name, []).append(pool)
    parts: list[tuple[Pool, list[Pool]]] = []
    for group in groups.values():
        wires = [fleet.wire(a, b) for a, b in combinations(group, 2)]
        if len(group) == 1 or any(wire is None for wire in wires):
            parts += [(pool, [pool]) for pool in group]
            continue
        known = [w for w in (*wires, *(fleet.wire(p, p) for p in group)) if w is not None]
        parts.append((_together(group, known), group))
    if len(parts) == len(fleet.pools):
        return fleet
    pools = tuple(pool for pool, _ in parts)
    return replace(fleet, pools=pools, links=_between(fleet, parts), usd_per_byte=_traffic(fleet, parts))


def _together(group: list[Pool], wires: list[Wire]) -> Pool:
    slowest = Wire(
        bandwidth_bytes_per_s=min(wire.bandwidth_bytes_per_s for wire in wires),
        latency_s=max(wire.latency_s for wire in wires),
    )
    first = group[0]
    return replace(
        first,
        name=f"{first.name} and {len(group) - 1} more",
        nodes=sum(pool.nodes for pool in group),
        between=slowest,
        node="",
    )


def _between(fleet: Fleet, parts: Sequence[tuple[Pool, list[Pool]]]) -> Mapping[tuple[str, str], Wire]:
    """Pair by pair: the slowest of what joins any two of the pools that they stand for."""
    found = {}
    for (a, of_a), (b, of_b) in combinations(parts, 2):
        wires = [fleet.wire(x, y) for x in of_a for y in of_b]
        known = [wire for wire in wires if wire is not None]
        if known and len(known) == len(wires):
            found[a.name, b.name] = Wire(
                bandwidth_bytes_per_s=min(wire.bandwidth_bytes_per_s for wire in known),
                latency_s=max(wire.latency_s for wire in known),
            )
    return found


def _traffic(fleet: Fleet, parts: Sequence[tuple[Pool, list[Pool]]]) -> Mapping[tuple[str, str], float]:
    found = {}
    for (a, of_a), (b, of_b) in combinations(parts, 2):
        price = max(fleet.traffic_usd_per_byte(x, y) for x in of_a for y in of_b)
        if price:
            found[a.name, b.name] = price
    return found
