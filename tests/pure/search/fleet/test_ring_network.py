"""RingNetwork through the replicas of pipelines that are cut in unlike ways."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.search.fleet.gradient_sync import Exchange
from heterodyne.search.fleet.plan import Template, TemplateStage
from heterodyne.search.fleet.ring_network import RingNetwork
from pure.search.fleet.small import Drawn, search_of

LAYERS = 10
BETWEEN = Wire(bandwidth_bytes_per_s=10e9, latency_s=1e-3)
FLEET = Fleet(
    name="f",
    pools=(Pool(name="a", kind="a", nodes=64, devices_per_node=1, memory_bytes=2**40, inside=None, between=BETWEEN),),
)
COSTS = Drawn(
    layers=("embedding", *("block",) * (LAYERS - 2), "head"),
    speed={"a": 1.0},
    fixed_s=0.1,
    lost=1.0,
    backward=2.0,
    head=1.0,
    kept=0.1,
    weights=0.1,
)
SUMS = search_of(FLEET, COSTS, 64).predictor.stage_tables.sums


def _cut(*borders: int, micro_batch: int = 1) -> Template:
    stages = (TemplateStage(pool="a", start=start, stop=stop) for start, stop in pairwise((0, *borders, LAYERS)))
    return Template(micro_batch=micro_batch, stages=tuple(stages))


def _exchanges(*placed: tuple[Template, int]) -> list[Exchange]:
    found = RingNetwork(FLEET).exchanges(placed, {template: SUMS(template) for template, _ in placed}, "stages")
    return [found.of[template] for template, _ in placed]


@pytest.mark.parametrize("counts", [(1, 1), (3, 1), (2, 5)])
def test_replicas_exchange_alike_whatever_their_micro_batches(counts: tuple[int, int]) -> None:
    plain = _cut(2, 3, 7)
    larger = replace(plain, micro_batch=2)
    (alike,) = _exchanges((plain, sum(counts)))
    for unlike in _exchanges(*zip((plain, larger), counts, strict=True)):
        for one, other in (
            (unlike.reduced_s, alike.reduced_s),
            (unlike.updated_s, alike.updated_s),
            (unlike.scattered_layers_s, alike.scattered_layers_s),
            (unlike.gathered_layers_s, alike.gathered_layers_s),
        ):
            assert one.tolist() == pytest.approx(other.tolist())
        # The shorter backward is what hides an exchange for both.
        assert unlike.backward_s.tolist() == pytest.approx(alike.backward_s.tolist())


def test_a_stage_waits_for_every_stage_that_has_one_of_its_layers() -> None:
    """A node sends (n - 1) / n of the bytes of its stage over its link; the slowest replica of a layer decides for all of them."""
    first, second = _cut(3), _cut(6, 8)
    table = SUMS(first).tables[0]

    def alone_s(start: int, stop: int) -> float:
        return table.reduced_bytes(start, stop) * (3 - 1) / 3 / BETWEEN.bandwidth_bytes_per_s + 2 * BETWEEN.latency_s

    spans = {template: [(s.start, s.stop) for s in template.stages] for template in (first, second)}
    every = [*spans[first], *spans[second]]
    for template, found in zip((first, second), _exchanges((first, 2), (second, 1)), strict=True):
        expected = [max(alone_s(a, b) for a, b in every if a < stop and start < b) for start, stop in spans[template]]
        assert found.scattered_s.tolist() == pytest.approx(expected)
