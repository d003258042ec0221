"""From clusters to fleets and back: nothing is lost, whatever nodes are called and however they are joined."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster import Cluster, Device, Link
from heterodyne.cluster.fleet_cluster import cluster_of, fleet_of

NAMES = ["a", "a-0", "a-1", "a-2", "a-0-0", "b-0", "b-1", "b-01", "b-3"]
SPEEDS = st.sampled_from([None, 1e9, 2e9])


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True))
    devices: list[Device] = []
    for node in nodes:
        sizes = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3))
        devices += [
            Device(id=f"{node}/cpu:{i}", kind="cpu", node=node, memory_bytes=size * 2**30)
            for i, size in enumerate(sizes)
        ]
    speeds = {pair: draw(SPEEDS) for i, a in enumerate(nodes) for pair in ((a, b) for b in nodes[i:])}
    links = (Link(between=pair, bandwidth_bytes_per_s=s, latency_s=1e-6) for pair, s in speeds.items() if s is not None)
    return Cluster(name="drawn", devices=tuple(devices), links=tuple(links))


@settings(deadline=None, max_examples=300)
@given(cluster=clusters())
def test_a_cluster_survives_being_a_fleet(cluster: Cluster) -> None:
    back = cluster_of(fleet_of(cluster))
    assert back.devices == cluster.devices
    assert {frozenset(k.between): k.bandwidth_bytes_per_s for k in back.links} == {
        frozenset(k.between): k.bandwidth_bytes_per_s for k in cluster.links
    }


def test_alike_nodes_that_are_joined_alike_are_one_pool() -> None:
    devices = tuple(Device(id=f"n-{i}/cpu:0", kind="cpu", node=f"n-{i}", memory_bytes=2**30) for i in range(4))
    alike = [
        Link(between=(f"n-{i}", f"n-{j}"), bandwidth_bytes_per_s=1e9, latency_s=0.0) for i in range(4) for j in range(i)
    ]
    assert [pool.nodes for pool in fleet_of(Cluster(name="c", devices=devices, links=tuple(alike))).pools] == [4]
    assert len(fleet_of(Cluster(name="c", devices=devices, links=tuple(alike[1:]))).pools) == 4


def test_the_memory_of_hosts_stays_and_of_one_pool_it_is_that_of_the_smallest() -> None:
    devices = tuple(Device(id=f"n-{i}/cpu:0", kind="cpu", node=f"n-{i}", memory_bytes=2**30) for i in range(2))
    cluster = Cluster(name="c", devices=devices, hosts={"n-0": 2**34, "n-1": 2**33})
    assert cluster_of(fleet_of(cluster)).hosts == {"n-0": 2**33, "n-1": 2**33}
    assert cluster_of(fleet_of(Cluster(name="c", devices=devices, hosts={"n-0": 2**34}))).hosts == {}
