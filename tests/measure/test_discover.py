"""Which devices there are, which one is whose, and that no two are called the same."""

from __future__ import annotations

import pytest
import torch

from heterodyne.cluster import Device
from heterodyne.errors import ClusterError
from heterodyne.measure.discover import (
    Sighting,
    discover_local,
    discover_machine,
    join_sightings,
    local_accelerators,
)
from heterodyne.measure.host_memory import HostMemory

GIB = 2**30


def cpu(node: str, number: int) -> Device:
    return Device(id=f"{node}/cpu:{number}", kind="cpu", node=node, memory_bytes=1)


def gpu(node: str, number: int, kind: str = "T4") -> Device:
    return Device(id=f"{node}/{kind}:{number}", kind=kind, node=node, memory_bytes=16 * GIB, backend="cuda")


def sighting(device: Device, node_rank: int = 0, *limits: tuple[str, int]) -> Sighting:
    return Sighting(device=device, node_rank=node_rank, memory=HostMemory(total_bytes=64 * GIB, limits=limits))


def test_this_machine_has_a_cpu_and_what_torch_sees() -> None:
    machine = discover_machine("here")
    assert machine.devices[-1].id == "here/cpu:0"
    assert 2**28 < machine.devices[-1].memory_bytes < 2**50
    seen = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    assert len(machine.devices) == seen + 1 == len(local_accelerators("here")) + 1


def test_the_fingerprint_of_this_machine_stays() -> None:
    assert discover_machine("here").fingerprint == discover_machine("here").fingerprint


def test_workers_take_the_accelerators_first_and_the_rest_is_cpu() -> None:
    there = (gpu("box", 0), gpu("box", 1))
    found = [discover_local(rank, 4, "box", accelerators=there) for rank in range(4)]
    assert [d.id for d in found] == ["box/T4:0", "box/T4:1", "box/cpu:0", "box/cpu:1"]


def test_cpu_workers_share_the_memory() -> None:
    alone = discover_local(0, 1, "box", accelerators=())
    among = discover_local(3, 4, "box", accelerators=())
    assert among.memory_bytes <= alone.memory_bytes / 4


@pytest.mark.parametrize(("rank", "size"), [(4, 4), (-1, 4), (0, 0)])
def test_a_local_rank_that_cannot_be(rank: int, size: int) -> None:
    with pytest.raises(ClusterError, match="LOCAL_RANK"):
        discover_local(rank, size, "box", accelerators=())


def test_a_cluster_lists_devices_by_rank_and_shares_memory_by_host() -> None:
    seen = [sighting(cpu("a", 0), 0), sighting(cpu("a", 1), 0), sighting(cpu("b", 0), 1), sighting(gpu("c", 0), 2)]
    cluster = join_sightings(seen)
    assert [d.id for d in cluster.devices] == ["a/cpu:0", "a/cpu:1", "b/cpu:0", "c/T4:0"]
    assert [d.memory_bytes for d in cluster.devices] == [32 * GIB, 32 * GIB, 64 * GIB, 16 * GIB]
    assert cluster.hosts == dict.fromkeys("abc", 64 * GIB)


def test_a_limit_on_one_worker_is_no_limit_on_the_other() -> None:
    cluster = join_sightings([sighting(cpu("a", 0), 0, ("small", GIB)), sighting(cpu("a", 1))])
    assert [d.memory_bytes for d in cluster.devices] == [GIB, 32 * GIB]


def test_hosts_of_one_name_are_told_apart_by_the_rank_of_the_node() -> None:
    cluster = join_sightings([sighting(cpu("box", 0), 0), sighting(cpu("box", 0), 1), sighting(cpu("else", 0), 2)])
    assert [d.id for d in cluster.devices] == ["box-0/cpu:0", "box-1/cpu:0", "else/cpu:0"]
    assert [d.memory_bytes for d in cluster.devices] == [64 * GIB] * 3


def test_two_ranks_that_claim_one_device_are_named() -> None:
    with pytest.raises(ClusterError, match=r"ranks 0 and 2 both claim box/T4:0.*LOCAL_RANK"):
        join_sightings([sighting(gpu("box", 0)), sighting(gpu("box", 1)), sighting(gpu("box", 0))])


def test_accelerators_of_one_node_get_the_link_of_the_catalog() -> None:
    kind = "A100-SXM-80GB"
    cluster = join_sightings([sighting(gpu("box", 0, kind)), sighting(gpu("box", 1, kind)), sighting(cpu("far", 0), 1)])
    assert [(link.between, link.bandwidth_bytes_per_s) for link in cluster.links] == [(("box", "box"), 300e9)]
