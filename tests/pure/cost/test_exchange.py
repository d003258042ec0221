"""What members send each other: everyone gets what it needs, no more, and the busiest port or link decides how long it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster import Cluster, Link
from heterodyne.cluster.profile import LinkSample
from heterodyne.cost.collective import Collectives
from heterodyne.cost.exchange import Round, Wires, buffer_bytes, rounds, to_everyone
from pure.build import cluster

SIZES = st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(sum).map(tuple)
LARGE = 2.0**20


def received(exchanged: Round) -> list[float]:
    return [sum(column) for column in zip(*exchanged, strict=True)]


def on_the_way(exchanged: Round) -> float:
    """Bytes that travel from one member to another."""
    return sum(size for i, row in enumerate(exchanged) for j, size in enumerate(row) if i != j)


@given(SIZES)
def test_a_gather_gives_everyone_all_and_a_scatter_everyone_its_slice_of_each(sizes: tuple[int, ...]) -> None:
    (gathered,) = rounds("all_gather", LARGE, len(sizes), source=sizes)
    (scattered,) = rounds("reduce_scatter", LARGE, len(sizes), target=sizes)
    assert received(gathered) == pytest.approx([LARGE] * len(sizes))
    assert received(scattered) == pytest.approx([len(sizes) * LARGE * size / sum(sizes) for size in sizes])
    assert scattered == tuple(zip(*gathered, strict=True))  # each is the other's way back


@given(SIZES, st.data())
def test_slices_of_one_dim_become_those_of_another_and_nothing_is_sent_twice(
    sizes: tuple[int, ...], data: st.DataObject
) -> None:
    others = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)).filter(sum).map(tuple))
    (turned,) = rounds("all_to_all", LARGE, len(sizes), source=sizes, target=others)
    assert received(turned) == pytest.approx([LARGE * other / sum(others) for other in others])
    assert list(map(sum, turned)) == pytest.approx([LARGE * size / sum(sizes) for size in sizes])


@given(SIZES, st.permutations(range(5)))
def test_other_slices_of_the_same_dim_need_only_what_they_have_not(sizes: tuple[int, ...], order: list[int]) -> None:
    others = tuple(sizes[place] for place in order if place < len(sizes))
    (moved,) = rounds("all_to_all", LARGE, len(sizes), source=sizes, target=others, same_dim=True)
    assert received(moved) == pytest.approx([LARGE * other / sum(others) for other in others])
    (stay,) = rounds("all_to_all", LARGE, len(sizes), source=sizes, target=sizes, same_dim=True)
    assert on_the_way(stay) == 0


@given(st.integers(2, 6))
def test_a_sum_takes_two_rounds_of_slices_or_one_of_everything(members: int) -> None:
    """Either way what a ring takes of a large tensor: 2 (n - 1) / n of it from each member (two members: all of it, once)."""
    large, small = rounds("all_reduce", LARGE, members), rounds("all_reduce", 1000.0, members)
    assert len(large) == (1 if members == 2 else 2)
    assert sum(map(on_the_way, large)) == pytest.approx(members * 2 * (members - 1) / members * LARGE)
    assert small == (to_everyone(1000.0, members),)


def wires(machines: Cluster, *, backend: str = "cuda", copies: float = 0.0) -> Wires:
    """Between all devices; ``copies``: seconds in which each reads or writes a byte."""
    devices = tuple(replace(device, backend=backend) for device in machines.devices)
    machines = replace(machines, devices=devices)
    collectives = Collectives(cluster=machines)
    return Wires.between([d.id for d in devices], machines, collectives, [copies] * len(devices))


PAIR = cluster(2, link=Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e3, latency_s=0.5))


def test_two_members_take_as_long_as_the_longer_message() -> None:
    made = wires(PAIR)
    assert sum(made.divided(rounds("all_gather", 4000.0, 2, source=(3, 1)))) == pytest.approx(0.5 + 3.0)
    assert sum(made.divided(rounds("all_reduce", 4000.0, 2))) == pytest.approx(0.5 + 4.0)
    assert sum(made.divided(())) == 0


def test_a_processor_does_not_send_and_receive_at_once() -> None:
    made = wires(PAIR, backend="cpu")
    assert sum(made.divided(rounds("all_gather", 4000.0, 2, source=(3, 1)))) == pytest.approx(0.5 + 3.0 + 1.0)
    assert sum(made.divided(rounds("all_reduce", 4000.0, 2))) == pytest.approx(0.5 + 8.0)


def test_what_is_sent_and_what_has_come_is_read_and_written_once_more() -> None:
    """Of the larger part, 3000 bytes, a copy for each member is laid down; both put 4000 together."""
    gathered = rounds("all_gather", 4000.0, 2, source=(3, 1))
    copied = sum(wires(PAIR, copies=1e-4).divided(gathered)) - sum(wires(PAIR).divided(gathered))
    assert copied == pytest.approx(2 * (6000 + 4000) * 1e-4)


def test_a_port_sends_one_message_after_another_and_a_link_of_two_nodes_carries_one_at_a_time() -> None:
    machines = replace(
        cluster(4, nodes=2),
        links=tuple(
            Link(between=ends, bandwidth_bytes_per_s=speed, latency_s=latency)
            for ends, speed, latency in (
                (("n0", "n0"), 1e3, 0.25),
                (("n1", "n1"), 1e3, 0.25),
                (("n0", "n1"), 1e2, 0.75),
            )
        ),
    )
    inside = machines.only([machines.devices[0].id, machines.devices[2].id])  # both of the first node
    assert sum(wires(inside).divided((to_everyone(100.0, 2),))) == pytest.approx(0.25 + 0.1)
    # Each port sends 100 bytes to one neighbour and to two others; four messages share each direction of the link.
    assert sum(wires(machines).divided((to_everyone(100.0, 4),))) == pytest.approx(0.75 + 4 * 1.0)


def met(machines: Cluster, *members: int) -> Wires:
    """Where an exchange of all devices of this cluster was measured: 0.01 s, and 1 ms for every 1000 bytes."""
    ids = tuple(device.id for device in machines.devices)
    samples = tuple(
        LinkSample(op="exchange", devices=ids, bytes=size, seconds=0.01 + 1e-6 * size, spread=0.0)
        for size in (1000, 100_000)
    )
    collectives = Collectives(cluster=machines, samples=samples)
    own = [ids[member] for member in members]
    return Wires.between(own, machines, collectives, [0.0] * len(own))


def test_what_was_measured_of_members_that_meet_counts_for_all_of_an_exchange() -> None:
    made = met(PAIR, 0, 1)
    assert sum(made.divided((to_everyone(5000.0, 2),))) == pytest.approx(0.01 + 0.005)
    assert sum(made.divided(rounds("all_gather", 8000.0, 2, source=(3, 1)))) == pytest.approx(0.01 + 0.004)
    assert sum(made.divided((to_everyone(5000.0, 2),) * 2)) == pytest.approx(2 * (0.01 + 0.005))


def test_of_fewer_members_the_last_comes_sooner() -> None:
    """Of n that come within a second, at moments that are equally likely, the last comes after n / (n + 1), and one alone after a half."""
    three = cluster(3, link=Link(between=("n0", "n0"), bandwidth_bytes_per_s=1e3, latency_s=0.5))
    nothing = to_everyone(0.0, 2)
    assert sum(met(three, 0, 1, 2).divided((to_everyone(0.0, 3),))) == pytest.approx(0.01)
    assert sum(met(three, 1, 2).divided((nothing,))) == pytest.approx(0.01 * (1 / 3) / (1 / 2))


def test_what_was_measured_between_nodes_says_nothing_of_one() -> None:
    machines = replace(
        cluster(4, nodes=2),
        links=tuple(
            Link(between=ends, bandwidth_bytes_per_s=1e3, latency_s=0.25)
            for ends in (("n0", "n0"), ("n1", "n1"), ("n0", "n1"))
        ),
    )
    assert met(machines, 0, 1, 2, 3).met is not None
    assert met(machines, 0, 2).met is None


SLOW = tuple(
    Link(between=ends, bandwidth_bytes_per_s=speed, latency_s=latency)
    for ends, speed, latency in ((("n0", "n0"), 1e4, 0.25), (("n1", "n1"), 1e3, 0.2), (("n0", "n1"), 1e2, 0.75))
)
INSIDE: Round = ((0, 0, 100, 0), (0, 0, 0, 100), (100, 0, 0, 0), (0, 100, 0, 0))
"""Between the two devices of each node."""


def test_what_stays_on_hosts_takes_as_long_as_on_the_slowest_one() -> None:
    machines = replace(cluster(4, nodes=2), links=SLOW)
    assert sum(wires(machines).divided((INSIDE,))) == pytest.approx(0.2 + 100 / 1e3)
    copied = wires(machines, backend="cpu", copies=1e-5)
    own, latency, transfer = copied.divided((INSIDE,))
    assert transfer == pytest.approx(0.0), "CPUs of a host share memory"
    assert own == pytest.approx(2 * (100 + 100) * 1e-5 + 2 * 200 * 1e-5)
    assert latency == 0.25


def test_of_what_was_measured_over_hosts_what_crosses_counts() -> None:
    """Two of four bytes between hosts, by pair and direction, whoever sends them; and what stays is not as slow."""
    machines = replace(cluster(4, nodes=2), links=SLOW)
    relayed: Round = ((0, 4000, 0, 0), (4000, 0, 0, 0), (0, 0, 0, 4000), (0, 0, 4000, 0))
    made = met(machines, 0, 1, 2, 3)
    assert sum(made.divided((relayed,))) == pytest.approx(sum(made.divided((to_everyone(2000.0, 4),))))
    assert sum(made.divided((relayed,))) == pytest.approx(0.01 + 0.002)
    assert sum(made.divided((INSIDE,))) == pytest.approx(0.25), "of messages between CPUs of the first node"


@given(SIZES)
def test_free_links_cost_nothing(sizes: tuple[int, ...]) -> None:
    free = wires(cluster(len(sizes)))
    assert sum(free.divided(rounds("all_gather", LARGE, len(sizes), source=sizes))) == pytest.approx(0.0, abs=1e-15)


def test_what_is_sent_to_everyone_lies_in_a_buffer_once_for_each() -> None:
    assert buffer_bytes(to_everyone(10.0, 3)) == 30 + 30
    (gathered,) = rounds("all_gather", 12.0, 2, source=(1, 3))
    assert buffer_bytes(gathered) == 12 + 18  # the larger part goes to both
