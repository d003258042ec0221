"""What a cluster file says is compared with the workers that were started, and its links with what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from heterodyne.api.measuring import _links_of
from heterodyne.api.session import _as_described
from heterodyne.cluster import Cluster, Device, Link
from heterodyne.cluster.profile import LinkSample, Profile
from heterodyne.doctor.faults import slow_links
from heterodyne.errors import ClusterError


def cluster(**counts: int) -> Cluster:
    return Cluster(
        name="said",
        devices=tuple(
            Device(id=f"{node}/cpu:{place}", kind="cpu", node=node, memory_bytes=2**30)
            for node, count in counts.items()
            for place in range(count)
        ),
        links=(Link(between=("a", "b"), bandwidth_bytes_per_s=1e9, latency_s=1e-4),) if "b" in counts else (),
        hosts=dict.fromkeys(counts, 2**31),
    )


@pytest.mark.parametrize(
    ("here", "told"),
    [
        ({"x": 2, "y": 3}, r"6 devices \(a: 2, b: 4\), and 5 workers were started \(x: 2, y: 3\)"),
        ({"x": 4, "y": 2}, r"6 devices \(a: 2, b: 4\), and 6 workers were started \(x: 4, y: 2\)"),
    ],
)
def test_a_node_with_another_number_of_devices_is_named_with_both(here: dict[str, int], told: str) -> None:
    with pytest.raises(ClusterError, match=told):
        _as_described(cluster(a=2, b=4), cluster(**here), Path("file.yaml"))


def test_workers_of_one_machine_may_stand_for_several() -> None:
    said = cluster(a=2, b=4)
    assert _as_described(said, cluster(x=6), Path("file.yaml")).devices == said.devices


@pytest.mark.parametrize(("seconds", "slow"), [(1e-3, False), (5e-2, True)])
def test_a_link_that_carries_much_less_than_the_file_says_is_named(seconds: float, slow: bool) -> None:
    said = cluster(a=2, b=1)
    samples = [
        LinkSample(op="send", devices=(f"{a}/cpu:{i}", f"{b}/cpu:{j}"), bytes=10**6, seconds=took_s, spread=0.0)
        for a, i, b, j, took_s in (("a", 0, "a", 1, 1.0), ("a", 1, "b", 0, seconds), ("b", 0, "a", 0, 2 * seconds))
    ]
    faults = list(slow_links(_links_of(Profile(key="", devices={}, links=tuple(samples)), said), said))
    told = [("a - b", "the link carries 20 MB/s, and the cluster file says 1 GB/s")] if slow else []
    assert [(fault.host, fault.what) for fault in faults] == told
