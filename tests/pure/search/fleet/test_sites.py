"""Ways over sites: what a slow link costs each of them, by hand; shares by speed; and what a file must say."""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf

import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import least_bytes
from heterodyne.errors import ClusterError
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.sites import Outer, Way, sites_of, ways_over_sites
from heterodyne.search.fleet.space import Space
from pure.search.fleet.small import GIB, Drawn

SLOW = Wire(bandwidth_bytes_per_s=2.5e6, latency_s=0.08)
SPACE = Space(zero=(0,), micro_batches=(1, 2, 4))


def pool(name: str, kind: str, devices: int, memory: float = 64.0) -> Pool:
    return Pool(
        name=name, kind=kind, nodes=1, devices_per_node=devices, memory_bytes=int(memory * GIB), place=(name,),
        inside=Wire(bandwidth_bytes_per_s=50e9, latency_s=0.0), usd_per_device_hour=2.0,
    )  # fmt: skip


def planner(wire: Wire | None = SLOW, *, samples: int = 48, memory: float = 64.0) -> FleetPlanner:
    pools = (pool("here", "fast", 2, memory), pool("there", "slow", 2, memory))
    links = {} if wire is None else {("here", "there"): wire}
    prices = {("here", "there"): 1e-10}
    costs = Drawn(
        layers=("embedding", *["block"] * 4, "head"), speed={"fast": 2.0, "slow": 1.0}, fixed_s=0.0, lost=0.0, backward=2.0,
        head=0.5, kept=0.01, weights=0.1, ways=1,
    )  # fmt: skip
    return FleetPlanner(
        fleet=Fleet(name="two", pools=pools, links=links, usd_per_byte=prices), costs=costs, global_batch=samples
    )


def found(way: str, ways: tuple[Way, ...]) -> Way:
    return next(own for own in ways if way in own.name)


def test_each_way_waits_for_the_link_as_its_bytes_say() -> None:
    of = planner()
    ways = ways_over_sites(of, SPACE, Outer(every=100, bits=16, delay=0))
    parameters = least_bytes(of.costs, "fast") / 2 / 4
    round_trip_s, bandwidth = 2 * SLOW.latency_s, SLOW.bandwidth_bytes_per_s
    exchange = {}
    for bits in (8, 16):
        size = parameters * bits / 8
        doublings = math.log2(min(size, bandwidth * round_trip_s) / 14_600)
        exchange[bits] = 2 * (size / bandwidth + SLOW.latency_s + round_trip_s * doublings) + 3 * round_trip_s
    sums = {bits: found(f"{bits} bits", ways) for bits in (8, 16)}
    for bits, way in sums.items():
        assert way.bytes_per_step == pytest.approx(2 * parameters * bits / 8)
        assert not way.exact
    assert sums[16].step_s - sums[8].step_s == pytest.approx(exchange[16] - exchange[8])
    apart = found("apart", ways)
    assert sums[16].step_s - apart.step_s == pytest.approx(exchange[16] * 99 / 100)
    assert apart.bytes_per_step == pytest.approx(sums[16].bytes_per_step / 100)
    assert apart.bytes_per_day == pytest.approx(apart.bytes_per_step / apart.step_s * 86_400)
    hourly = 4 * 2.0
    assert apart.usd == pytest.approx(hourly * apart.step_s / 3600 + apart.bytes_per_step * 1e-10)


def test_a_delay_hides_the_exchange_and_is_chosen_where_it_is_not_given() -> None:
    free = found("apart", ways_over_sites(planner(), SPACE, Outer(every=1000)))
    waits = found("apart", ways_over_sites(planner(), SPACE, Outer(every=1000, delay=0)))
    assert free.outer is not None
    assert free.outer.delay
    assert 0 < free.outer.delay < 1000
    assert free.step_s < waits.step_s
    assert found(
        "apart", ways_over_sites(planner(replace(SLOW, bandwidth_bytes_per_s=inf, latency_s=0.0)), SPACE, Outer())
    ).step_s == pytest.approx(free.step_s)


def test_sites_have_samples_by_their_speed() -> None:
    apart = found("apart", ways_over_sites(planner(samples=60), SPACE, Outer()))
    assert sum(apart.shares.values()) == 60
    assert apart.shares["here"] == pytest.approx(40, abs=4)  # twice as fast


def test_a_model_that_no_site_holds_is_cut_over_the_link() -> None:
    small = planner(memory=1.5)
    ways = ways_over_sites(small, SPACE, Outer())
    (over,) = [way for way in ways if not way.note]
    assert over.name == "a pipeline over the link"
    assert over.exact
    assert over.bytes_per_step > 0
    doublings = math.log2(min(over.bytes_per_step / 2, 2 * SLOW.latency_s * SLOW.bandwidth_bytes_per_s) / 14_600)
    two_agreements, slow_start = 2 * 2 * SLOW.latency_s, 2 * SLOW.latency_s * doublings
    best = small.plan(space=SPACE).best.predicted
    assert over.step_s == pytest.approx(best.step_s + two_agreements + slow_start)


def test_processors_announce_what_they_agree_on() -> None:
    gpus = planner()
    pools = tuple(replace(pool, backend="cpu") for pool in gpus.fleet.pools)
    cpus = replace(gpus, fleet=replace(gpus.fleet, pools=pools))
    for way, agreements in (("32 bits", 1), ("16 bits", 0), ("here alone", 0)):
        on_gpus, on_cpus = (found(way, ways_over_sites(of, SPACE, Outer())).step_s for of in (gpus, cpus))
        assert on_cpus - on_gpus == pytest.approx(agreements * 2 * SLOW.latency_s)


def test_what_a_file_must_say() -> None:
    with pytest.raises(ClusterError, match=r"joins the sites here and there; add to links: \{between: \[here, there\]"):
        sites_of(planner(None).fleet)
    alone = replace(planner().fleet, pools=planner().fleet.pools[:1], links={}, usd_per_byte={})
    with pytest.raises(ClusterError, match="is one site, here: give its sites as regions or zones"):
        sites_of(alone)


def test_fewer_samples_than_sites_are_a_reason() -> None:
    ways = ways_over_sites(planner(samples=1), SPACE, Outer())
    assert found("32 bits", ways).note == found("apart", ways).note == "1 sample a step for 2 sites"
    assert found("32 bits", ways).exact
    assert not found("8 bits", ways).exact
