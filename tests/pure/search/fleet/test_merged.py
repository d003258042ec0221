"""Pools that are alike are one, and no link gets faster by it."""

from __future__ import annotations

from dataclasses import replace

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.search.fleet.merged import merged

NEAR, FAR, SLOW = (Wire(bandwidth_bytes_per_s=1e9 * n, latency_s=1e-6 / n) for n in (40, 20, 5))


def pool(name: str, *place: str, kind: str = "A100-SXM-80GB", **changes: object) -> Pool:
    made = Pool(
        name=name, kind=kind, nodes=4, devices_per_node=8, memory_bytes=2**36, inside=NEAR, between=NEAR, place=place
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_alike_pools_of_a_zone_are_one_as_far_apart_as_any_two() -> None:
    fleet = Fleet(
        name="x",
        pools=(pool("a0", "z", "p0"), pool("a1", "z", "p1"), pool("v", "z", "p2", kind="V100-SXM2-32GB")),
        links={("z/p0", "z/p1"): FAR, ("z/p0", "z/p2"): FAR, ("z/p1", "z/p2"): SLOW},
    )
    found = merged(fleet)
    assert [(p.name, p.nodes) for p in found.pools] == [("a0 and 1 more", 8), ("v", 4)]
    assert found.devices == fleet.devices
    together, other = found.pools
    assert found.wire(together, together) == FAR
    assert found.wire(together, other) == SLOW


def test_what_differs_stays_apart() -> None:
    one, two = pool("a", "z", "p0"), pool("b", "z", "p1")
    links = {("z/p0", "z/p1"): FAR}
    for other in (
        replace(two, usd_per_device_hour=2.0),
        replace(two, memory_bytes=2**35),
        replace(two, devices_per_node=4),
        replace(two, kind="V100-SXM2-32GB"),
        replace(two, spot=True),
    ):
        fleet = Fleet(name="x", pools=(one, other), links=links)
        assert merged(fleet) is fleet
    elsewhere = Fleet(name="x", pools=(one, pool("b", "y", "p1")), links={("z", "y"): FAR})
    assert merged(elsewhere) is elsewhere
    unjoined = Fleet(name="x", pools=(one, two))
    assert len(merged(unjoined).pools) == 2


def test_traffic_costs_what_it_cost() -> None:
    fleet = Fleet(
        name="x",
        pools=(pool("a0", "z", "p0"), pool("a1", "z", "p1"), pool("far", "y", "p")),
        links={("z/p0", "z/p1"): FAR, ("z", "y"): SLOW},
        usd_per_byte={("z", "y"): 1e-9},
    )
    found = merged(fleet)
    together, far = found.pools
    assert found.traffic_usd_per_byte(together, far) == 1e-9
    assert found.traffic_usd_per_byte(together, together) == 0.0
