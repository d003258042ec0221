"""What hosts send each other is what messages and collectives move between them, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from heterodyne.cluster import Cluster, Device, Link
from heterodyne.cost.collective import Collectives
from heterodyne.cost.routes import Route
from heterodyne.cost.traffic import traffic_between_hosts
from heterodyne.plan.buckets import Bucket


def hosts(sizes: Sequence[int], backend: str = "cpu") -> Cluster:
    nodes = [f"n{number}" for number in range(len(sizes))]
    devices = tuple(
        Device(id=f"{node}/{number}", kind=backend, node=node, memory_bytes=2**30, backend=backend)
        for node, size in zip(nodes, sizes, strict=True)
        for number in range(size)
    )
    links = [
        Link(between=(a, b), bandwidth_bytes_per_s=1e8 if a != b else 1e10, latency_s=1e-4)
        for place, a in enumerate(nodes)
        for b in nodes[place:]
    ]
    return Cluster(name="hosts", devices=devices, links=tuple(links))


def bucket(cluster: Cluster, size: int) -> Bucket:
    return Bucket(index=0, parts=(), bytes=size, blocks=(), owners=tuple(device.id for device in cluster.devices))


def sent(cluster: Cluster, size: int, shares: dict[str, int] | None = None) -> dict[tuple[str, str], int]:
    return traffic_between_hosts(cluster, Collectives(cluster=cluster), [], [bucket(cluster, size)], shares)


def leaving(found: dict[tuple[str, str], int], node: str) -> int:
    return sum(size for (source, _), size in found.items() if source == node)


def test_three_hosts_send_four_thirds_of_their_sums() -> None:
    """N (1 + (G - 2) f) with G = 3 and f = 1/3."""
    found = sent(hosts((3, 2, 1)), 3 * 2**20)
    for node in ("n0", "n1", "n2"):
        assert leaving(found, node) == pytest.approx(4 * 2**20, rel=1e-4)


def test_shards_travel_once_each_way() -> None:
    """The reduce-scatter sends from each host what others keep, and the all-gather brings each host what others have."""
    cluster = hosts((2, 2))
    shares = dict.fromkeys((device.id for device in cluster.devices), 1)
    found = sent(cluster, 2**20, shares)
    assert {pair: round(size / 2**19, 3) for pair, size in found.items()} == {("n0", "n1"): 2.0, ("n1", "n0"): 2.0}


def test_devices_of_one_library_are_a_ring() -> None:
    """Between two hosts it goes over the link once in each direction: 2 N (R - 1) / R."""
    found = sent(hosts((2, 2), backend="xpu"), 2**20)
    assert found == {("n0", "n1"): 3 * 2**19, ("n1", "n0"): 3 * 2**19}


def test_what_an_island_moves_between_its_hosts_counts() -> None:
    """Two makers: inside of the island over two hosts, sums and totals are a ring, 2 N (R - 1) / R each way."""
    one, other = hosts((2, 2), backend="xpu"), hosts((1,), backend="npu")
    devices = (*one.devices, *(replace(device, id="n2/0", node="n2") for device in other.devices))
    links = (*one.links, *(Link(between=("n2", n), bandwidth_bytes_per_s=1e8, latency_s=1e-4) for n in ("n0", "n1")))
    found = sent(Cluster(name="two makers", devices=devices, links=links), 2**20)
    assert found["n0", "n1"] == pytest.approx(1.5 * 2**20, rel=1e-3)
    assert leaving(found, "n2") == pytest.approx(2**20, rel=1e-3)


def test_messages_count_between_hosts_only() -> None:
    cluster = hosts((2, 1))
    routes = [
        Route(kind="F", source=(0, 0), destination=(1, 1), link="a", bytes=(10, 10), latency_s=0.0, seconds=(0.0, 0.0)),
        Route(kind="F", source=(1, 1), destination=(2, 2), link="b", bytes=(7, 5), latency_s=0.0, seconds=(0.0, 0.0)),
    ]
    assert traffic_between_hosts(cluster, Collectives(cluster=cluster), routes, [], None) == {("n0", "n1"): 12}
