"""What-if: devices more or less, other links, and what cannot be meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.what_if import changed
from heterodyne.errors import ClusterError

LAB = """\
name: lab
prices: {A100-SXM-80GB: 2}
nodes:
  - {name: new, count: 3, devices: [{kind: A100-SXM-80GB, count: 8}]}
  - {name: old, devices: [{kind: V100-SXM2-16GB, count: 4}, {kind: cpu, memory: 8 GiB}]}
links:
  - {between: [new, new], bandwidth: 200 Gb/s, latency: 5 us}
  - {between: all, bandwidth: 50 Gb/s, latency: 30 us}
"""

SITES = """\
links:
  - {between: nodes, bandwidth: 400 Gb/s, latency: 5 us}
  - {between: zones, bandwidth: 100 Gb/s, latency: 1 ms, usd_per_gb: 0.01}
  - {between: regions, bandwidth: 10 Gb/s, latency: 60 ms}
regions:
  - name: east
    zones:
      - {name: a, nodes: [{kind: A100-SXM-80GB, count: 16, devices_per_node: 8}]}
      - {name: b, nodes: [{kind: A100-SXM-80GB, count: 4, devices_per_node: 8}]}
  - {name: west, nodes: [{kind: L40S, count: 4, devices_per_node: 8}]}
"""

Load = Callable[[str], Fleet]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(text: str) -> Fleet:
        path = tmp_path / "fleet.yaml"
        path.write_text(text, encoding="utf-8")
        return load_fleet(path)

    return load


def gbit(wire: Wire | None) -> float | None:
    return None if wire is None else wire.bandwidth_bytes_per_s * 8 / 1e9


def test_no_change_is_the_same_fleet(load: Load) -> None:
    assert changed(load(LAB)) == load(LAB)


def test_devices_of_a_kind_that_is_there_stand_beside_it(load: Load) -> None:
    fleet = changed(load(LAB), add=["8xA100"])
    added, new, old = fleet.pools[-1], fleet.pool("new"), fleet.pool("old/cpu")
    assert (added.kind, added.nodes, added.devices_per_node, added.place) == ("A100-SXM-80GB", 1, 8, new.place)
    assert added.usd_per_device_hour == 2
    assert added.inside == new.inside
    assert gbit(fleet.wire(added, new)) == 200
    assert gbit(fleet.wire(added, old)) == 50


def test_devices_of_a_new_kind_take_the_links_of_all(load: Load) -> None:
    fleet = changed(load(LAB), add=["2x8xMI300"])
    added = fleet.pools[-1]
    assert (added.kind, added.devices, added.memory_bytes) == ("MI300X", 16, 192 * 10**9)
    assert added.inside is not None
    assert gbit(added.between) == gbit(fleet.wire(added, fleet.pool("new"))) == 50
    assert added.usd_per_device_hour is None


def test_devices_in_a_place(load: Load) -> None:
    fleet = changed(load(SITES), add=["16x8xH100-SXM-80GB@east/b", "8xL40S@east/a"])
    h100, l40s = fleet.pools[-2:]
    assert gbit(h100.between) == gbit(fleet.wire(h100, fleet.pool("east/b"))) == 400
    assert gbit(fleet.wire(h100, l40s)) == 100
    assert gbit(fleet.wire(l40s, fleet.pool("west"))) == 10
    assert fleet.traffic_usd_per_byte(h100, l40s) == pytest.approx(0.01e-9)


def test_the_same_kind_can_be_added_twice(load: Load) -> None:
    fleet = changed(load(LAB), add=["8xL40S", "4xL40S"])
    assert [(pool.name, pool.devices) for pool in fleet.pools[-2:]] == [("L40S", 8), ("L40S-2", 4)]


@pytest.mark.parametrize(
    ("without", "left"),
    [
        (["new"], {"old/V100-SXM2-16GB": 4, "old/cpu": 1}),
        (["old"], {"new": 24}),
        (["old/cpu"], {"new": 24, "old/V100-SXM2-16GB": 4}),
        (["new-1"], {"new": 16, "old/V100-SXM2-16GB": 4, "old/cpu": 1}),
        (["2xnew", "old"], {"new": 8}),
    ],
)
def test_what_is_gone(load: Load, without: list[str], left: dict[str, int]) -> None:
    fleet = changed(load(LAB), without=without)
    assert {pool.name: pool.devices for pool in fleet.pools} == left
    assert all((pool.between is None) == (pool.nodes == 1) for pool in fleet.pools)


def test_a_node_of_several_kinds_goes_as_a_whole(load: Load) -> None:
    mixed = load(LAB.replace("name: old, ", "name: old, count: 3, "))
    fleet = changed(mixed, without=["old-1"])
    assert {pool.name: pool.nodes for pool in fleet.pools} == {"new": 3, "old/V100-SXM2-16GB": 2, "old/cpu": 2}
    with pytest.raises(ClusterError, match="have the same names but are not the same"):
        changed(mixed, without=["1xold/cpu"])


def test_what_was_added_goes_without_what_it_stands_beside(load: Load) -> None:
    fleet = changed(load(LAB), add=["8xA100"])
    assert changed(fleet, without=["A100-SXM-80GB"]) == load(LAB)
    assert {pool.kind for pool in changed(fleet, without=["new"]).pools} == set(fleet.kinds)


def test_a_whole_region_is_gone_with_its_links(load: Load) -> None:
    fleet = changed(load(SITES), without=["east"])
    assert [pool.name for pool in fleet.pools] == ["west"]
    assert not any("east" in end for ends in fleet.links for end in ends)


def test_every_link_between_nodes(load: Load) -> None:
    fleet = changed(load(SITES), links=["inter=100Gb/s"])
    assert {gbit(fleet.wire(a, b)) for a in fleet.pools for b in fleet.pools} == {100}
    west = fleet.wire(fleet.pool("west"), fleet.pool("east/a"))
    assert west is not None
    assert west.latency_s == pytest.approx(0.06)
    later = changed(fleet, links=["inter=100Gb/s,0.001 s"])
    assert {w.latency_s for a in later.pools for b in later.pools if (w := later.wire(a, b))} == {1e-3}


def test_the_link_inside_every_node(load: Load) -> None:
    fleet = changed(load(LAB), links=["intra=900GB/s,2us"])
    assert {pool.inside for pool in fleet.pools} == {Wire(bandwidth_bytes_per_s=900e9, latency_s=2e-6)}


def test_the_link_of_a_place_and_of_two(load: Load) -> None:
    fleet = changed(load(SITES), links=["east/a=800Gb/s", "east:west=40Gb/s", "east=200Gb/s,2ms"])
    a, b, west = fleet.pools
    assert gbit(a.between) == gbit(fleet.wire(a, a)) == 800
    assert gbit(b.between) == 400
    assert gbit(fleet.wire(a, b)) == 200
    assert gbit(fleet.wire(west, b)) == 40


def test_the_link_of_all_changes_what_has_no_narrower_one(load: Load) -> None:
    fleet = changed(load(LAB), links=["all=25Gb/s"])
    assert gbit(fleet.pool("new").between) == 200
    assert gbit(fleet.wire(fleet.pool("new"), fleet.pool("old/cpu"))) == 25


def test_pools_that_carry_their_own_link() -> None:
    wire = Wire(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    pool = Pool(name="a", kind="T4", nodes=2, devices_per_node=1, memory_bytes=2**30, between=wire)
    fleet = changed(Fleet(name="f", pools=(pool,)), links=["a=80Gb/s"])
    assert gbit(fleet.pool("a").between) == 80
    assert gbit(changed(fleet, links=["inter=8Gb/s"]).pool("a").between) == 8


def test_an_added_node_that_nothing_joins(load: Load) -> None:
    alone = load(LAB.replace("between: all", "between: [new, old]"))
    with pytest.raises(
        ClusterError, match=r"nothing says what joins the added H100-SXM-80GB.*'H100-SXM-80GB:all=100Gb/s,10us'"
    ):
        changed(alone, add=["8xH100-SXM-80GB"])
    fleet = changed(alone, add=["8xH100-SXM-80GB"], links=["H100-SXM-80GB:all=100Gb/s,10us"])
    assert {gbit(fleet.wire(fleet.pools[-1], pool)) for pool in fleet.pools[:-1]} == {100}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"without": ["node7"]}, "there is no pool node7; there are new, old/V100-SXM2-16GB, old/cpu, old"),
        ({"without": ["new-3"]}, "no pool new-3"),
        ({"without": ["4xnew"]}, "new has 3 nodes, so 4 cannot"),
        ({"without": ["new", "old"]}, "nothing is left of fleet 'lab'"),
        ({"add": ["H100"]}, "adds nothing; write DEVICESxKIND"),
        ({"add": ["0xH100-SXM-80GB"]}, "adds 1 nodes of 0 devices"),
        ({"add": ["8xH100"]}, "can be H100-SXM-80GB, H100-SXM-96GB, H100-PCIe-80GB, H100-NVL-94GB; say which"),
        ({"add": ["8xX9000"]}, "no accelerator 'X9000'; the fleet has A100"),
        ({"add": ["8xTrainium1"]}, "does not state the memory of Trainium1"),
        ({"add": ["8xL4@mars"]}, "there is no place mars; there are new, old"),
        ({"links": ["inter"]}, "is no link; write 'inter=100Gb/s'"),
        ({"links": ["inter=100"]}, "inter=100.*has no unit"),
        ({"links": ["inter=0Gb/s"]}, "bandwidth above 0"),
        ({"links": ["mars=1Gb/s"]}, "there is no pool or place mars; there are inter, intra"),
        ({"links": ["new:mars=1Gb/s"]}, "there is no pool or place mars"),
        ({"links": ["new-0:new=1Gb/s"]}, "no pool or place new-0"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(load: Load, change: dict[str, list[str]], told: str) -> None:
    with pytest.raises(ClusterError, match=told):
        changed(load(LAB), **change)  # type: ignore[arg-type]
