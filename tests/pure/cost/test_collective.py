"""Collectives: fitted where measured, scaled by the ring formula to other groups, from links where nothing was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster import Cluster, Device, Link, LinkSample
from heterodyne.cost.collective import FREE, Collectives, fit
from heterodyne.errors import MeasureError
from pure.build import cluster

BYTES = (1_000, 30_000, 1_000_000, 30_000_000)


@given(st.floats(0, 1e-2), st.floats(1e-12, 1e-7))
def test_an_exact_line_is_found(alpha: float, beta: float) -> None:
    line = fit((size, alpha + beta * size) for size in BYTES)
    assert line.error < 1e-6
    assert line(2e6) == pytest.approx(alpha + beta * 2e6, rel=1e-6)


@given(st.lists(st.floats(1e-6, 1), min_size=4, max_size=4))
def test_no_fit_is_negative_and_none_is_better_nearby(times: list[float]) -> None:
    line = fit(zip(BYTES, times, strict=True))
    assert line.latency_s >= 0
    assert line.s_per_byte >= 0

    def squares(alpha: float, beta: float) -> float:
        return sum(((alpha + beta * x) / t - 1) ** 2 for x, t in zip(BYTES, times, strict=True))

    best = squares(line.latency_s, line.s_per_byte)
    for da, db in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01), (0.01, -0.01), (-0.01, 0.01)):
        alpha, beta = line.latency_s + da * max(times), line.s_per_byte + db * max(times) / BYTES[-1]
        if alpha >= 0 and beta >= 0:
            assert best <= squares(alpha, beta) * (1 + 1e-9) + 1e-9


def test_small_messages_count_as_much_as_large_ones() -> None:
    """A plain fit would miss a latency of a thousandth of the largest time; a relative one finds it."""
    line = fit([(1, 1.0e-4), (10, 1.0e-4), (10**9, 1.1)])
    assert line.latency_s == pytest.approx(1e-4, rel=0.01)


def test_one_size_tells_bandwidth_not_latency() -> None:
    line = fit([(1000, 1e-3), (1000, 1e-3)])
    assert (line.latency_s, line(2000)) == (0, pytest.approx(2e-3))


def test_nothing_measured_is_no_fit() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        fit([])


def reduces(devices: tuple[str, ...], alpha: float, beta: float) -> tuple[LinkSample, ...]:
    return tuple(
        LinkSample(op="all_reduce", devices=devices, bytes=size, seconds=alpha + beta * size, spread=0.0)
        for size in BYTES
    )


def sends(a: str, b: str, alpha: float, beta: float) -> tuple[LinkSample, ...]:
    return tuple(
        LinkSample(op="send", devices=(a, b), bytes=size, seconds=alpha + beta * size, spread=0.0) for size in BYTES
    )


def test_what_a_message_takes_of_a_device_is_that_of_the_pair_or_of_the_device_elsewhere() -> None:
    """Sent or received alike; of pairs that were not measured it is the device's own over all that were."""
    a, b, c = IDS[:3]
    near = tuple(replace(s, busy_s=(1e-3 + 1e-9 * s.bytes, 2e-3)) for s in sends(a, b, 1e-4, 1e-9))
    known = Collectives(cluster=MACHINES, samples=near)
    assert known.busy(a, b)(1e6) == pytest.approx(2e-3)
    assert known.busy(b, a)(1e6) == pytest.approx(2e-3)
    assert known.busy(a, c)(2e6) == pytest.approx(known.busy(a, b)(2e6)) == pytest.approx(3e-3)
    assert known.busy(c, a) == known.busy(a, a) == FREE
    assert Collectives(cluster=MACHINES, samples=sends(a, b, 1e-4, 1e-9)).busy(a, b) == FREE


MACHINES = cluster(4)
IDS = tuple(d.id for d in MACHINES.devices)
APART = cluster(4, nodes=4)
AWAY = tuple(d.id for d in APART.devices)


def test_one_device_has_nobody_to_talk_to() -> None:
    assert Collectives(cluster=MACHINES).all_reduce(IDS[:1]) == FREE
    assert Collectives(cluster=MACHINES).send(IDS[0], IDS[0]) == FREE


def test_the_measured_group_is_taken_as_measured_in_any_order() -> None:
    measured = Collectives(cluster=MACHINES, samples=reduces(IDS, 1e-3, 2e-9))
    assert measured.all_reduce(IDS[::-1])(1e6) == pytest.approx(3e-3)


def test_a_part_of_it_by_the_ring_formula() -> None:
    """2 (n - 1) / n of the bytes in 2 (n - 1) transfers: from 4 devices to 2, 1/1.5 of the bytes, a third of the latency."""
    part = Collectives(cluster=APART, samples=reduces(AWAY, 3e-3, 3e-9)).all_reduce(AWAY[1:3])
    assert part.latency_s == pytest.approx(1e-3, rel=1e-6)
    assert part.s_per_byte == pytest.approx(2e-9, rel=1e-6)


def test_the_smallest_group_around_is_nearest_and_a_smaller_one_is_scaled_up() -> None:
    samples = (*reduces(AWAY, 3e-3, 3e-9), *reduces(AWAY[:3], 2e-3, 4e-9))
    known = Collectives(cluster=APART, samples=samples)
    assert known.all_reduce(AWAY[:2]).s_per_byte == pytest.approx(4e-9 * 1 / (4 / 3), rel=1e-6)
    up = Collectives(cluster=APART, samples=reduces(AWAY[:2], 1e-3, 2e-9)).all_reduce(AWAY)
    assert (up.latency_s, up.s_per_byte) == (pytest.approx(3e-3), pytest.approx(3e-9))


def test_in_shared_memory_as_much_is_copied_by_few_as_by_many_and_waits_go_by_who_comes_last() -> None:
    """The last of n that come at any moment is (n - 1) / (n + 1) / 2 behind the mean: from 4 devices to 2, 5/9 of it."""
    known = Collectives(cluster=MACHINES, samples=reduces(IDS, 9e-3, 3e-9))
    part = known.all_reduce(IDS[1:3])
    assert (part.latency_s, part.s_per_byte) == (pytest.approx(5e-3), pytest.approx(3e-9))
    up = Collectives(cluster=MACHINES, samples=reduces(IDS[:2], 5e-3, 3e-9)).all_reduce(IDS)
    assert (up.latency_s, up.s_per_byte) == (pytest.approx(9e-3), pytest.approx(3e-9))


def test_half_of_an_all_reduce_is_half_of_its_transfers_but_waits_as_long_in_shared_memory() -> None:
    """There ranks meet before and after what they do, be it a whole or a half, and once to agree on a number."""
    near = Collectives(cluster=MACHINES, samples=reduces(IDS, 2e-3, 2e-9))
    away = Collectives(cluster=APART, samples=reduces(AWAY, 2e-3, 2e-9))
    even = (1, 1, 1, 1)
    half, ring = near.reduce_scatter(IDS, even), away.reduce_scatter(AWAY, even)
    assert (half.latency_s, half.s_per_byte) == (pytest.approx(2e-3), pytest.approx(1e-9))
    assert (ring.latency_s, ring.s_per_byte) == (pytest.approx(1e-3), pytest.approx(1e-9))
    assert near.meeting_s(IDS) == pytest.approx(1e-3, rel=1e-4)
    assert away.meeting_s(AWAY) == pytest.approx(2e-3, rel=1e-4)


def test_links_make_a_ring_as_slow_as_the_slowest() -> None:
    devices = tuple(replace(device, backend="xpu") for device in cluster(3, nodes=2).devices)
    ring = Collectives(cluster=Cluster(name="two", devices=devices, links=TWO)).all_reduce([d.id for d in devices])
    assert ring.latency_s == pytest.approx(4 * 1e-4)
    assert ring.s_per_byte == pytest.approx(4 / 3 * 1e-8)


TWO = (
    Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e9, latency_s=1e-6),
    Link(between=("n0", "n1"), bandwidth_bytes_per_s=1e8, latency_s=1e-4),
)


def test_two_islands_pass_everything_once_between_them() -> None:
    """Workers on the CPUs of two hosts: sums of everything go each way over the link, and inside n0 half is sent before and after."""
    devices = cluster(3, nodes=2).devices
    over = Collectives(cluster=Cluster(name="two", devices=devices, links=TWO)).all_reduce([d.id for d in devices])
    assert over.s_per_byte == pytest.approx(1e-8 + 2 * 0.5e-9)
    assert 2 * 1e-4 < over.latency_s < 3 * 1e-4


def islands(uplinks: Sequence[float], sizes: Sequence[int]) -> Cluster:
    """Hosts with links of their own to the others, and workers that exchange for nothing inside."""
    nodes = [f"n{number}" for number in range(len(sizes))]
    devices = tuple(
        Device(id=f"{node}/cpu:{number}", kind="cpu", node=node, memory_bytes=2**30)
        for node, size in zip(nodes, sizes, strict=True)
        for number in range(size)
    )
    pairs = list(combinations(range(len(nodes)), 2))
    return Cluster(
        name="islands",
        devices=devices,
        links=(
            *(Link(between=(node, node), bandwidth_bytes_per_s=1e18, latency_s=0.0) for node in nodes),
            *(
                Link(between=(nodes[a], nodes[b]), bandwidth_bytes_per_s=min(uplinks[a], uplinks[b]), latency_s=0.0)
                for a, b in pairs
            ),
        ),
    )


def test_islands_cost_what_the_closed_form_says() -> None:
    """N / b of the slowest for 20, 40 and 40, since its share of homes is 0; 4/3 N / b where three are alike."""
    uneven, alike = (islands(links, (3, 2, 1)) for links in ((20e6, 40e6, 80e6), (40e6,) * 3))
    found = [Collectives(cluster=each).all_reduce([d.id for d in each.devices]) for each in (uneven, alike)]
    assert found[0].s_per_byte == pytest.approx(1 / 20e6, rel=1e-3)
    assert found[1].s_per_byte == pytest.approx(4 / 3 / 40e6, rel=1e-3)


def test_the_link_of_a_host_is_its_fastest_as_measured() -> None:
    slow = islands((20e6, 40e6, 80e6), (2, 1, 1))
    names = [device.id for device in slow.devices]
    stated = Collectives(cluster=slow).to_other_hosts()
    assert stated is not None
    assert [round(link.bandwidth_bytes_per_s) for link in stated] == [20e6, 20e6, 40e6, 40e6]
    measured = Collectives(cluster=slow, samples=sends(names[0], names[3], 1e-4, 1e-9)).to_other_hosts()
    assert measured is not None
    assert measured[0].bandwidth_bytes_per_s == pytest.approx(1e9)
    assert measured[0].latency_s == pytest.approx(1e-4)
    assert Collectives(cluster=Cluster(name="bare", devices=slow.devices)).to_other_hosts() is None
    assert Collectives(cluster=MACHINES).to_other_hosts() is None  # one host


def test_ranges_over_islands_pass_each_link_once() -> None:
    """In a reduce-scatter each host sends what belongs to others."""
    alike = islands((40e6,) * 3, (3, 2, 1))
    found = Collectives(cluster=alike).reduce_scatter([d.id for d in alike.devices], (1, 1, 1, 1, 1, 1))
    assert found.s_per_byte == pytest.approx(5 / 6 / 40e6, rel=1e-3)


def test_a_measured_group_corrects_those_inside_of_it() -> None:
    alike = islands((40e6,) * 3, (3, 2, 1))
    names = [device.id for device in alike.devices]
    on_paper = Collectives(cluster=alike)
    whole = on_paper.all_reduce(names)
    measured = Collectives(cluster=alike, samples=reduces(tuple(names), 0.0, 1.25 * whole.s_per_byte))
    part = names[:5]
    assert measured.all_reduce(part).s_per_byte == pytest.approx(1.25 * on_paper.all_reduce(part).s_per_byte)


def test_measured_sends_come_before_the_cluster_file() -> None:
    known = Collectives(cluster=MACHINES, samples=sends(IDS[0], IDS[1], 1e-3, 1e-9))
    assert known.send(IDS[0], IDS[1])(1e6) == pytest.approx(2e-3)
    assert known.send(IDS[1], IDS[0])(1e6) == pytest.approx(2e-3)  # the other way: nothing else is known of it
    assert known.all_reduce(IDS[:2])(1e6) == pytest.approx(2 * 1e-3 + 1e-3)


def test_a_link_of_which_nothing_is_known_is_named() -> None:
    bare = Cluster(name="bare", devices=MACHINES.devices)
    with pytest.raises(MeasureError, match="between n0/cpu:0 and n0/cpu:1"):
        Collectives(cluster=bare).all_reduce(IDS[:2])


def test_a_ring_of_messages_takes_as_long_as_its_messages_whatever_an_all_reduce_takes() -> None:
    """No faster than all but the smallest range over the slowest link; without latency and of two devices, just that."""
    quick = reduces(IDS[:2], 0.0, 1e-12)
    free = Collectives(cluster=MACHINES, samples=(*quick, *sends(IDS[0], IDS[1], 0.0, 2e-9)))
    assert free.ring_s(IDS[:2], (1, 3), 8e6) == pytest.approx(2e-9 * 6e6)
    pairs = [
        sends(a, b, 1e-4, beta) for a, b, beta in zip(IDS, (*IDS[1:], IDS[0]), (1e-9, 2e-9, 3e-9, 1e-9), strict=True)
    ]
    ring = Collectives(cluster=MACHINES, samples=tuple(sample for pair in pairs for sample in pair))
    assert ring.ring_s(IDS, (2, 2, 2, 2), 8e6) > 3e-9 * 6e6
    assert ring.ring_s(IDS, (2, 2, 2, 2), 8e6) < ring.ring_s(IDS, (1, 3, 2, 2), 8e6)
    assert ring.ring_s(IDS[:1], (1,), 8e6) == 0


def test_a_pair_that_was_not_measured_is_as_far_as_others_of_the_same_nodes() -> None:
    """Not as the sum over all that was measured, which crosses the slow link."""
    machines = replace(cluster(6, nodes=2), links=())
    ids = [device.id for device in machines.devices]  # of the nodes in turn
    pairs = {(ids[0], ids[2]): 1e-9, (ids[0], ids[1]): 1e-6}
    sends = [
        LinkSample(op="send", devices=pair, bytes=size, seconds=1e-4 + s_per_byte * size, spread=0.0)
        for pair, s_per_byte in pairs.items()
        for size in (10_000, 1_000_000)
    ]
    sums = LinkSample(op="all_reduce", devices=tuple(ids), bytes=1_000_000, seconds=9.0, spread=0.0)
    links = Collectives(cluster=machines, samples=(*sends, sums))
    assert links.send(ids[2], ids[4]).s_per_byte == pytest.approx(1e-9)
    assert links.send(ids[5], ids[4]).s_per_byte == pytest.approx(1e-6)
    assert links.send(ids[1], ids[3]).s_per_byte > 1e-6, "nothing else is known of the second node"
