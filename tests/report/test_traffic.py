"""What hosts send each other, as a table and as a picture."""

from __future__ import annotations

import re
from itertools import combinations, permutations
from math import hypot
from pathlib import Path

import pytest

from heterodyne.cluster import Cluster, Device, Link, LinkSample
from heterodyne.plan import Plan, Prediction
from heterodyne.report.html import render
from heterodyne.report.run import Run
from heterodyne.report.traffic import flows_of, traffic_picture, traffic_rows

NODES = ("a", "b", "c<")
CLUSTER = Cluster(
    name="three",
    devices=tuple(Device(id=f"{node}/cpu:0", kind="cpu", node=node, memory_bytes=1000) for node in NODES),
    links=tuple(
        Link(between=pair, bandwidth_bytes_per_s=1e6, latency_s=1e-3)
        for pair in combinations(NODES, 2)
        if pair != ("b", "c<")
    ),
)


def plan_with(traffic: dict[str, int]) -> Plan:
    predicted = Prediction(step_s=2.0, samples_per_s=4.0, memory_bytes={}, traffic=traffic)
    return Plan(model="m", cluster="c", global_batch_size=8, pipelines=(), idle=(), predicted=predicted)


EVERYWHERE = {f"{a} -> {b}": 10**6 * n for n, (a, b) in enumerate(permutations(NODES, 2), 1)}


def test_a_link_is_busy_for_its_bytes_over_its_bandwidth() -> None:
    measured = LinkSample(op="send", devices=("a/cpu:0", "b/cpu:0"), bytes=4 * 10**6, seconds=1.0, spread=0.0)
    flows = {f"{flow.source} -> {flow.target}": flow for flow in flows_of(plan_with(EVERYWHERE), CLUSTER, [measured])}
    assert flows["a -> b"].busy == pytest.approx(1 / 4 / 2)  # as measured
    assert flows["a -> c<"].busy == pytest.approx(2 / 1 / 2)  # as the file says
    assert flows["b -> c<"].busy is None
    assert len(traffic_rows(list(flows.values())).rows) == 6


def test_no_label_lies_on_another_or_on_a_host() -> None:
    picture = traffic_picture(flows_of(plan_with(EVERYWHERE), CLUSTER))
    assert picture is not None
    places = [(each["x"], each["y"]) for each in picture["flows"]]
    assert all(hypot(p[0] - q[0], p[1] - q[1]) > 30 for p, q in combinations(places, 2))
    for host in picture["hosts"]:
        assert all(hypot(x - host["x"], y - host["y"]) > picture["radius"] for x, y in places)


def test_the_page_draws_it_and_escapes_names() -> None:
    page = render(Run(directory=Path("run"), cluster=CLUSTER, plan=plan_with(EVERYWHERE)))
    (figure,) = re.findall(r'<figure class="traffic">.*?</figure>', page, re.DOTALL)
    assert figure.count("<line ") == 6
    assert "c&lt;" in figure
    assert "c<<" not in figure
    alone = render(Run(directory=Path("run"), cluster=CLUSTER, plan=plan_with({})))
    assert 'class="traffic"' not in alone
