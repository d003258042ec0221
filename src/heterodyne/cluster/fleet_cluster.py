"""From a Cluster, which lists every device, to a Fleet, which counts them, and back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, combinations_with_replacement, groupby, product

from heterodyne.cluster.catalog import find
from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cluster.spec import Cluster, Device, Link
from heterodyne.errors import ClusterError
from heterodyne.units import counted

__all__ = ["MOST_LISTED_DEVICES", "MOST_LISTED_NODES", "cluster_of", "fleet_of"]

MOST_LISTED_DEVICES = 4_096
MOST_LISTED_NODES = 1_024  # half a million links

_NUMBERED = re.compile(r"^(.+)-(0|[1-9][0-9]*)$")


def cluster_of(fleet: Fleet) -> Cluster:
    """Every device and every link of a fleet, with ids as a cluster file makes them (``new-0/A100-SXM-80GB:3``).

    Raises ClusterError above 4,096 devices or 1,024 nodes.
    """
    nodes = sum(group[0].nodes for group in _groups(fleet))
    if fleet.devices > MOST_LISTED_DEVICES or nodes > MOST_LISTED_NODES:
        raise ClusterError(
            f"fleet {fleet.name!r} has {counted(fleet.devices, 'device')} in {counted(nodes, 'node')}; "
            f"device by device at most {MOST_LISTED_DEVICES:,} "
            f"in {MOST_LISTED_NODES:,} can be listed: take some of its pools"
        )
    devices: list[Device] = []
    inner: list[Link] = []
    standing: list[tuple[str, Pool]] = []
    for group in _groups(fleet):
        for name in group[0].node_names:
            devices += _devices(group, name)
            standing.append((name, group[0]))
            if group[0].inside is not None:
                inner.append(_link(name, name, group[0].inside))
    leading = list({pool.name: pool for _, pool in standing}.values())
    wires = {(a.name, b.name): fleet.wire(a, b) for a, b in combinations_with_replacement(leading, 2)}
    outer = [
        _link(one, other, wire)
        for (one, a), (other, b) in combinations(standing, 2)
        if (wire := wires[a.name, b.name]) is not None
    ]
    hosts = {name: pool.host_memory_bytes for name, pool in standing if pool.host_memory_bytes is not None}
    return Cluster(name=fleet.name, devices=tuple(devices), links=(*inner, *outer), hosts=hosts)


def fleet_of(cluster: Cluster) -> Fleet:
    """The same machines as pools: nodes ``new-0``, ``new-1``... that are alike and joined alike are one.

    Prices and watts are not known of a cluster, but for the watts that the catalog states. The ids of the devices are forgotten.
    """
    nodes = {name: tuple(devices) for name, devices in _by_node(cluster).items()}
    wires = {frozenset(link.between): _wire(link) for link in cluster.links}
    runs = _runs(nodes, wires)
    runs = _apart(runs, wires)
    pools = [pool for run in runs for pool in _pools(run, nodes, wires, cluster.hosts)]
    links: dict[tuple[str, str], Wire] = {}
    for run in runs:
        wire = wires.get(frozenset(run.names[:2])) if len(run.names) > 1 else None
        if wire is not None:
            links[run.name, run.name] = wire
    for a, b in combinations(runs, 2):
        wire = wires.get(frozenset((a.names[0], b.names[0])))
        if wire is not None:
            links[a.name, b.name] = wire
    return Fleet(name=cluster.name, pools=tuple(pools), links=links)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Nodes that follow each other and are alike."""

    name: str
    names: tuple[str, ...]
    numbered: bool


def _groups(fleet: Fleet) -> list[list[Pool]]:
    """Pools that stand in the same nodes, together."""
    return [list(group) for _, group in groupby(fleet.pools, key=lambda pool: pool.node_name)]


def _devices(group: list[Pool], node: str) -> Iterator[Device]:
    counted: Counter[str] = Counter()
    for pool in group:
        for _ in range(pool.devices_per_node):
            number = counted[pool.kind]
            counted[pool.kind] += 1
            yield Device(
                id=f"{node}/{pool.kind}:{number}",
                kind=pool.kind,
                node=node,
                memory_bytes=pool.memory_bytes,
                backend=pool.backend,
            )


def _link(a: str, b: str, wire: Wire) -> Link:
    return Link(between=(a, b), bandwidth_bytes_per_s=wire.bandwidth_bytes_per_s, latency_s=wire.latency_s)


def _wire(link: Link) -> Wire:
    return Wire(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s)


def _by_node(cluster: Cluster) -> dict[str, list[Device]]:
    nodes: dict[str, list[Device]] = {}
    for device in cluster.devices:
        nodes.setdefault(device.node, []).append(device)
    return nodes


def _alike(device: Device) -> tuple[str, int, str]:
    return device.kind, device.memory_bytes, device.backend


def _runs(nodes: dict[str, tuple[Device, ...]], wires: dict[frozenset[str], Wire]) -> list[_Run]:
    """Runs of nodes whose names count from 0 and which hold the same; nodes of other names are alone."""
    found: list[list[str]] = []
    for name, devices in nodes.items():
        last = found[-1] if found else []
        match = _NUMBERED.match(name)
        follows = match is not None and bool(last) and last[0] == f"{match[1]}-0" and int(match[2]) == len(last)
        if follows and _content(last[0], nodes[last[0]], wires) == _content(name, devices, wires):
            last.append(name)
        else:
            found.append([name])
    runs = []
    for names in found:
        match = _NUMBERED.match(names[0])
        base = match[1] if match is not None and match[2] == "0" else names[0]
        # a node whose number goes on after an unlike one must keep its own name, and so must those before it
        mixed = sum(other[0].startswith(f"{base}-") or other[0] == base for other in found) > 1
        whole = base != names[0] and not mixed
        runs += (
            [_Run(name=base, names=tuple(names), numbered=True)]
            if whole
            else [_Run(name=name, names=(name,), numbered=False) for name in names]
        )
    return runs


def _content(
    name: str, devices: tuple[Device, ...], wires: dict[frozenset[str], Wire]
) -> tuple[list[tuple[str, int, str]], Wire | None]:
    return [_alike(device) for device in devices], wires.get(frozenset((name,)))


def _apart(runs: list[_Run], wires: dict[frozenset[str], Wire]) -> list[_Run]:
    """Runs whose nodes are not joined alike taken apart into single nodes."""
    uneven = {run.name for run in runs if len({wires.get(frozenset(pair)) for pair in combinations(run.names, 2)}) > 1}
    for a, b in combinations(runs, 2):
        if len({wires.get(frozenset(pair)) for pair in product(a.names, b.names)}) > 1:
            uneven |= {a.name, b.name}
    return [
        part
        for run in runs
        for part in (
            [_Run(name=name, names=(name,), numbered=False) for name in run.names] if run.name in uneven else [run]
        )
    ]


def _pools(
    run: _Run, nodes: dict[str, tuple[Device, ...]], wires: dict[frozenset[str], Wire], hosts: Mapping[str, int]
) -> Iterator[Pool]:
    first = run.names[0]
    of_hosts = [hosts[name] for name in run.names if name in hosts]  # measured ones differ by a little
    parts = [list(part) for _, part in groupby(nodes[first], key=_alike)]
    named: Counter[str] = Counter()
    for part in parts:
        device = part[0]
        named[device.kind] += 1
        number = f"-{named[device.kind]}" if named[device.kind] > 1 else ""
        known = None if device.backend == "cpu" else find(device.kind)
        yield Pool(
            name=run.name if len(parts) == 1 else f"{run.name}/{device.kind}{number}",
            kind=device.kind,
            nodes=len(run.names),
            devices_per_node=len(part),
            memory_bytes=device.memory_bytes,
            inside=wires.get(frozenset((first,))),
            between=wires.get(frozenset(run.names[:2])) if len(run.names) > 1 else None,
            place=(run.name,),
            backend=device.backend,
            watts_per_device=known.tdp_w if known else None,
            node=run.name,
            numbered=run.numbered,
            host_memory_bytes=min(of_hosts) if len(of_hosts) == len(run.names) else None,
        )
