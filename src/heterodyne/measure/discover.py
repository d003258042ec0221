"""Which devices this machine has, and which of them is a worker's.

Workers take the accelerators first: local rank k drives accelerator k while there are any, and is a CPU worker after that.
CPU workers of one host share its memory.
"""

from __future__ import annotations

import inspect
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from heterodyne.cluster.catalog import find
from heterodyne.cluster.file import catalog_link
from heterodyne.cluster.spec import Cluster, Device
from heterodyne.errors import ClusterError
from heterodyne.measure.host_memory import HostMemory, read_host_memory, round_down, worker_memory
from heterodyne.measure.peers import Peers

__all__ = [
    "Sighting",
    "discover_cluster",
    "discover_local",
    "discover_machine",
    "has_bf16_units",
    "join_sightings",
    "local_accelerators",
]


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """What one worker tells the others: its device, on which host, and what it sees of that host's memory."""

    device: Device
    node_rank: int
    memory: HostMemory


def local_accelerators(hostname: str) -> tuple[Device, ...]:
    """The accelerators that torch sees here, in its order; the kind by the catalog, else as the driver calls it."""
    if not torch.accelerator.is_available():
        return ()
    current = torch.accelerator.current_accelerator()
    assert current is not None
    module = torch.get_device_module(current.type)
    devices: list[Device] = []
    counted: Counter[str] = Counter()
    for index in range(torch.accelerator.device_count()):
        name, memory_bytes = _described(module, current.type, index)
        known = find(name)
        kind = known.kind if known else name.strip().replace(" ", "-").replace("/", "-")
        devices.append(
            Device(
                id=f"{hostname}/{kind}:{counted[kind]}",
                kind=kind,
                node=hostname,
                memory_bytes=round_down(memory_bytes),
                backend=current.type,
            )
        )
        counted[kind] += 1
    return tuple(devices)


def _described(module: Any, device_type: str, index: int) -> tuple[str, int]:
    """The name of a device, and its bytes. A type that does not describe its devices (Apple's) says what it lends of the host's memory."""
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(index)
        return str(properties.name), int(properties.total_memory)
    return device_type, int(module.recommended_max_memory())


def discover_local(
    local_rank: int,
    local_world_size: int,
    hostname: str,
    *,
    accelerators: Sequence[Device] | None = None,
) -> Device:
    """The device of this worker, one of ``local_world_size`` on this host.

    Args:
        accelerators: those of this host; not given, torch is asked.

    The other CPU workers of this host are taken to see as much of its memory as the process that started this one does;
    `discover_cluster` asks them. Raises ClusterError for a local rank that is not below the local world size.
    """
    if not 0 <= local_rank < local_world_size:
        raise ClusterError(
            f"local rank {local_rank} is not one of the {local_world_size} workers of {hostname}; "
            "check LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    there = local_accelerators(hostname) if accelerators is None else tuple(accelerators)
    if local_rank < len(there):
        return there[local_rank]
    others = local_world_size - min(len(there), local_world_size) - 1
    return Device(
        id=f"{hostname}/cpu:{local_rank - len(there)}",
        kind="cpu",
        node=hostname,
        memory_bytes=worker_memory(read_host_memory(), (read_host_memory(os.getppid()),) * others),
    )


def discover_machine(hostname: str | None = None) -> Cluster:
    """This machine as a cluster: its accelerators, and its CPU as one device with all of the memory. None: its own name."""
    hostname = socket.gethostname() if hostname is None else hostname
    accelerators = local_accelerators(hostname)
    cpu = Device(id=f"{hostname}/cpu:0", kind="cpu", node=hostname, memory_bytes=worker_memory(read_host_memory(), ()))
    link = catalog_link(hostname, [d.kind for d in accelerators])
    return Cluster(name=hostname, devices=(*accelerators, cpu), links=() if link is None else (link,))


def discover_cluster(
    peers: Peers, local_rank: int, local_world_size: int, hostname: str, *, node_rank: int = 0
) -> Cluster:
    """The cluster that these workers are, in the order of their ranks; every rank calls it and gets the same."""
    mine = Sighting(
        device=discover_local(local_rank, local_world_size, hostname),
        node_rank=node_rank,
        memory=read_host_memory(),
    )
    return join_sightings(peers.all_gather_object(mine))


def join_sightings(sightings: Sequence[Sighting]) -> Cluster:
    """One cluster from what each rank saw.

    A host name that several nodes bear (containers often do) gets the node's rank behind it. Raises ClusterError if two ranks
    claim one device.
    """
    ranks_of: dict[str, set[int]] = {}
    for s in sightings:
        ranks_of.setdefault(s.device.node, set()).add(s.node_rank)
    devices: list[Device] = []
    claimed: dict[str, int] = {}
    for rank, s in enumerate(sightings):
        host = s.device.node
        node = f"{host}-{s.node_rank}" if len(ranks_of[host]) > 1 else host
        device = replace(s.device, node=node, id=f"{node}/{s.device.id.split('/', 1)[1]}")
        if device.kind == "cpu":
            siblings = [
                o.memory
                for other, o in enumerate(sightings)
                if other != rank and o.device.kind == "cpu" and (o.device.node, o.node_rank) == (host, s.node_rank)
            ]
            device = replace(device, memory_bytes=worker_memory(s.memory, siblings))
        if device.id in claimed:
            raise ClusterError(
                f"ranks {claimed[device.id]} and {rank} both claim {device.id}; "
                "check that LOCAL_RANK differs on one host, and the node's rank (GROUP_RANK) between hosts of one name"
            )
        claimed[device.id] = rank
        devices.append(device)
    nodes = list(dict.fromkeys(d.node for d in devices))
    found = [catalog_link(node, [d.kind for d in devices if d.node == node]) for node in nodes]
    return Cluster(
        name=nodes[0] if len(nodes) == 1 else "cluster",
        devices=tuple(devices),
        links=tuple(link for link in found if link is not None),
        hosts={
            node: min(worker_memory(s.memory, ()) for s, d in zip(sightings, devices, strict=True) if d.node == node)
            for node in nodes
        },
    )


def has_bf16_units(device: torch.device) -> bool:
    """Return whether an accelerator computes in bf16 itself, as far as torch tells; one that does not tell has them. No CPU is asked."""
    if device.type == "cpu":
        return False
    ask = getattr(torch.get_device_module(device.type), "is_bf16_supported", None)
    if ask is None:
        return True
    with torch.accelerator.device_index(device.index):
        # CUDA emulates it on devices of before 2020, and says so unless it is asked not to.
        wants = "including_emulation" in inspect.signature(ask).parameters
        return bool(ask(including_emulation=False) if wants else ask())
