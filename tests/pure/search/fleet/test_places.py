"""Places with several stages: their messages, their gradients, and how a table tells them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.plan.short import in_short
from heterodyne.report.plan_tables import plan_rows
from heterodyne.search.fleet.plan import Template, TemplateGroup, TemplatePlan, TemplateStage, chunked
from heterodyne.search.fleet.ring_network import RingNetwork
from heterodyne.search.fleet.written import written_plan
from heterodyne.search.fleet.zero_traffic import of_places
from pure.search.fleet.small import Drawn, search_of

NEAR, FAR = (Wire(bandwidth_bytes_per_s=1e9 * n, latency_s=1e-5) for n in (100, 10))
FLEET = Fleet(
    name="f",
    pools=(
        Pool(
            name="a", kind="a", nodes=4, devices_per_node=2, memory_bytes=2**36, inside=NEAR, between=FAR
        ),
    ),
)  # fmt: skip
COSTS = Drawn(
    layers=("block",) * 8, speed={"a": 1.0}, fixed_s=0.0, lost=1.0, backward=2.0, head=1.0, kept=0.1, weights=0.1
)
PLAIN = Template(micro_batch=1, stages=tuple(TemplateStage(pool="a", start=2 * n, stop=2 * n + 2) for n in range(4)))
(CHUNKED,) = chunked(PLAIN, 2)


@pytest.mark.parametrize("layout", ["stages", "pipelines"])
def test_gradients_take_as_long_wherever_the_layers_of_a_place_are(layout: str) -> None:
    predictor = search_of(FLEET, COSTS, 16).predictor
    rings = RingNetwork(FLEET)
    seconds = []
    for template in (PLAIN, CHUNKED):
        exchanges = rings.exchanges([(template, 2)], {template: predictor.stage_tables.sums(template)}, layout)  # type: ignore[arg-type]
        seconds.append(of_places(exchanges.of[template], template.places).reduced_s.max())
    another_ring_s = 2 * (NEAR if layout == "stages" else FAR).latency_s  # one for each stage
    assert seconds[1] == pytest.approx(seconds[0] + another_ring_s, rel=1e-9)
    assert seconds[0] > 0


def test_the_message_from_the_last_place_to_the_first_goes_between_nodes() -> None:
    rings = RingNetwork(FLEET)
    sends = [rings.send_s(CHUNKED, number, 1e9, "pipelines") for number in range(7)]
    assert sends == sends[:4] + sends[:3]
    assert sends[0] == sends[2] < sends[1] == sends[3]  # two places on each of two nodes
    halves = replace(CHUNKED, stages=tuple(replace(s, stop=s.start + 1) for s in CHUNKED.stages[::2]), chunks=2)
    assert [rings.send_s(halves, number, 1e9, "pipelines") for number in range(3)] == [sends[0]] * 3


def test_a_table_tells_the_layers_of_each_place() -> None:
    group = TemplateGroup(template=CHUNKED, replicas=2, num_microbatches=8)
    plan = TemplatePlan(groups=(group,), global_batch=16, schedule="Interleaved1F1B")
    made = written_plan(plan, FLEET)
    rows = plan_rows(made, FLEET).rows
    assert [(row[2], row[6]) for row in rows] == [
        ("0, 4", "0, 4"),
        ("1, 5", "1, 5"),
        ("2, 6", "2, 6"),
        ("3, 7", "3, 7"),
    ]
    assert in_short(made) == "2 x (4 x a, 2 stages each)"
    assert made.device_count == 8
