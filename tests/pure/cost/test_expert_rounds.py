"""What a mixture sends between hosts and inside of them, by hand and by counting all choices that a token can make."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster import Cluster, Link
from heterodyne.cost.collective import Collectives
from heterodyne.cost.exchange import Round, Wires
from heterodyne.cost.expert_rounds import MixtureRows, direct, hierarchical, reached
from heterodyne.plan.relays import members_of, relays
from pure.build import cluster


def mixture(
    tokens: tuple[int, ...], experts: tuple[int, ...], choices: int, *, row: float = 1.0, weight: float = 0.0
) -> MixtureRows:
    return MixtureRows(tokens=tokens, experts=experts, choices=choices, row_bytes=row, weight_bytes=weight)


def crossing(exchanged: Round, hosts: tuple[int, ...]) -> float:
    """Bytes between hosts."""
    return sum(
        size for a, row in zip(hosts, exchanged, strict=True) for b, size in zip(hosts, row, strict=True) if a != b
    )


@given(st.integers(1, 8), st.data())
def test_a_host_is_reached_by_the_sets_of_choices_that_have_one_there(experts: int, data: st.DataObject) -> None:
    own, choices = data.draw(st.integers(0, experts)), data.draw(st.integers(1, experts))
    sets = list(combinations(range(experts), choices))
    assert reached(experts, own, choices) == pytest.approx(sum(min(each) < own for each in sets) / len(sets))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=7))
def test_relays_are_on_the_hosts_that_they_are_for(nodes: list[int]) -> None:
    hosts = tuple(sorted(set(nodes)).index(node) for node in nodes)
    of_host = members_of(hosts)
    for member, own in enumerate(relays(hosts)):
        assert [hosts[relay] for relay in own] == list(range(len(of_host)))
        assert own[hosts[member]] == member
    for host, members in enumerate(of_host):  # each takes its turn, where there are enough others
        for other in (n for n in range(len(of_host)) if n != host and len(of_host[n]) >= len(members)):
            assert {relays(hosts)[source][host] for source in of_host[other]} == set(members)


def test_two_hosts_with_two_members_and_one() -> None:
    """Six experts, 3 and 1 on the first host and 2 on the second one; of two choices one is there with 1 - C(4, 2) / C(6, 2) = 3 / 5, and
    one of the first host's four is among them with 1 - 1 / 15."""
    hosts = (0, 0, 1)
    rows = mixture((10, 20, 30), (3, 1, 2), 2, row=100.0, weight=4.0)
    forward, backward = hierarchical(rows, hosts)
    counts, there, _, inside, made, home = forward
    out, back = 3 / 5, 14 / 15
    beside = 100 + 2 * (4 + 4)  # weights, and numbers of experts
    assert crossing(counts, hosts) == 4 * 8
    assert there[0] == pytest.approx((10 * back * beside, 0, 10 * out * beside))
    assert there[1] == pytest.approx((0, 20 * back * beside, 20 * out * beside))
    assert there[2] == pytest.approx((30 * back * beside, 0, 30 * out * beside))
    # The first member is relay for itself and for the third: 40 tokens, of whose 80 choices 3 / 6 and 1 / 6 are on its host.
    assert inside[0] == pytest.approx((4000, 80 / 6 * 100, 0))
    assert inside[1] == pytest.approx((2000, 40 / 6 * 100, 0))
    assert inside[2] == pytest.approx((0, 0, 4000))
    assert made == tuple(zip(*inside, strict=True))
    assert crossing(home, hosts) == pytest.approx((30 * out + 30 * back) * 100)
    assert backward[1:3] == (inside, made)
    assert backward[0] == tuple(zip(*home, strict=True))
    assert crossing(backward[3], hosts) == pytest.approx((30 * out + 30 * back) * (100 + 2 * 4))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_all_choices_of_a_host_are_run_there_whichever_way(first: int, second: int, choices: int) -> None:
    hosts, rows = (0, 1, 0, 1), mixture((5, 0, 7, 9), (first, second, 0, 3), min(choices, first + second))
    _, there, _ = direct(rows)[0]
    inside = hierarchical(rows, hosts)[0][3]
    arrived, handed_on = (list(map(sum, zip(*sent, strict=True))) for sent in (there, inside))
    assert handed_on == pytest.approx(arrived)
    assert crossing(inside, hosts) == 0


@given(st.integers(1, 6))
def test_of_one_choice_as_many_rows_cross_and_of_more_fewer(choices: int) -> None:
    hosts, rows = (0, 0, 1, 1), mixture((4, 4, 4, 4), (2, 2, 2, 2), choices)
    rows_of_choices = crossing(direct(rows)[0][1], hosts)
    rows_of_tokens = crossing(hierarchical(rows, hosts)[0][-1], hosts)
    assert rows_of_choices == pytest.approx(16 * choices / 2)
    assert rows_of_tokens == pytest.approx(16 * (1 - comb(4, choices) / comb(8, choices)))
    assert rows_of_tokens == pytest.approx(rows_of_choices) if choices == 1 else rows_of_tokens < rows_of_choices


def joined(between: float, *, latency_s: float = 1e-4) -> Cluster:
    """Two nodes with two devices each, and so many bytes a second between them."""
    machines = cluster(4, nodes=2)
    inside = [Link(between=(n, n), bandwidth_bytes_per_s=1e9, latency_s=latency_s) for n in ("n0", "n1")]
    slow = Link(between=("n0", "n1"), bandwidth_bytes_per_s=between, latency_s=latency_s)
    return replace(machines, links=(*inside, slow))


def seconds(machines: Cluster, rounds: tuple[tuple[Round, ...], tuple[Round, ...]]) -> float:
    devices = [device.id for device in machines.devices]
    wires = Wires.between(devices, machines, Collectives(cluster=machines), [1e-9] * len(devices))
    return sum(map(sum, map(wires.divided, rounds)))


@pytest.mark.parametrize(("between", "fewer_bytes_pay"), [(1e6, True), (1e9, False)])
def test_slow_links_between_hosts_pay_for_more_steps(between: float, fewer_bytes_pay: bool) -> None:
    rows, machines = mixture((100, 100, 100, 100), (2, 2, 2, 2), 2, row=1e3, weight=4.0), joined(between)
    hosts = (0, 1, 0, 1)
    assert (seconds(machines, hierarchical(rows, hosts)) < seconds(machines, direct(rows))) is fewer_bytes_pay
