"""The Cluster: which devices there are, where they stand, what joins them.

A Cluster lists devices one by one, each with its own memory; nothing is averaged over unlike devices. Speeds are not
here: they are measured (`cluster.profile`) or looked up in the catalog. Links carry alpha (latency) and beta
(bandwidth); a link between two devices is that of their node, or that between their nodes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import Field

from heterodyne.errors import ClusterError
from heterodyne.json_files import EXACT, Count, Seconds

__all__ = ["Cluster", "Device", "Link"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or one CPU worker.

    Args:
        id: unique in the cluster, ``node/name``: ``old/V100-SXM2-16GB:3``, ``laptop/cpu:0``.
        kind: a name of the catalog, or ``cpu``, or whatever the driver calls it.
        node: the node that it stands in.
        memory_bytes: what a worker on it may use.
        backend: ``cpu``, ``cuda``, ``xpu``, ...: the name of the torch device type.
    """

    __pydantic_config__ = EXACT

    id: str
    kind: str
    node: str
    memory_bytes: Count
    backend: str = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Joins devices inside one node (both ends equal) or of two nodes. Symmetric."""

    __pydantic_config__ = EXACT

    between: tuple[str, str]
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0)]
    latency_s: Seconds


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All devices, in the order of their ranks, and the links between and inside their nodes.

    ``hosts``: of nodes, the bytes of memory of the host itself, where plans may keep optimizer state and activations; of a node that is not
    there nothing is known. It is no part of the fingerprint: what a plan is does not change with it.

    Raises ClusterError if there is no device, an id is used twice, or a link names a node that is not there.
    """

    __pydantic_config__ = EXACT

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    hosts: Mapping[str, Count] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.devices:
            raise ClusterError(f"cluster {self.name!r} has no device; give at least one node with one device")
        ids = [device.id for device in self.devices]
        twice = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
        if twice:
            raise ClusterError(f"device ids must be unique; used more than once: {', '.join(twice)}")
        nodes = {device.node for device in self.devices}
        unknown = sorted({end for link in self.links for end in link.between} - nodes)
        if unknown:
            raise ClusterError(f"a link names nodes that are not there: {', '.join(unknown)}")

    @cached_property
    def _by_id(self) -> dict[str, Device]:
        return {device.id: device for device in self.devices}

    @cached_property
    def _links(self) -> dict[frozenset[str], Link]:
        return {frozenset(link.between): link for link in self.links}

    def device(self, device_id: str) -> Device:
        """The device of that id. Raises ClusterError."""
        try:
            return self._by_id[device_id]
        except KeyError:
            raise ClusterError(f"there is no device {device_id!r}; the cluster has {', '.join(self._by_id)}") from None

    def rank(self, device_id: str) -> int:
        """The global rank of a device: its place in the list."""
        return self.devices.index(self.device(device_id))

    def link(self, a: str, b: str) -> Link | None:
        """The link that joins two devices, None if nothing is known of it."""
        return self._links.get(frozenset((self.device(a).node, self.device(b).node)))

    def only(self, device_ids: Iterable[str]) -> Cluster:
        """The same cluster with just those devices, in the order of this one. Raises ClusterError if none is left."""
        wanted = {self.device(i).id for i in device_ids}
        devices = tuple(d for d in self.devices if d.id in wanted)
        nodes = {d.node for d in devices}
        links = tuple(link for link in self.links if set(link.between) <= nodes)
        hosts = {node: size for node, size in self.hosts.items() if node in nodes}
        return Cluster(name=self.name, devices=devices, links=links, hosts=hosts)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with devices, memory, links or their order; not with the cluster's name."""
        content = {"devices": [asdict(d) for d in self.devices], "links": [asdict(link) for link in self.links]}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
