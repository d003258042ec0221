"""A head that shares the weights of the embedding: where both are on different places, these sum its gradient in every step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.predictor.layer_costs import predicted_layers
from heterodyne.predictor.transformer import Transformer
from heterodyne.search.fleet.plan import Template, TemplateStage
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.tables import Tables

SMALL = Transformer(
    layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64, ffn=4864, gated=True, vocab=151936, seq=1024, tied=True
)
"""Qwen2.5-0.5B: of its 494 million parameters 136 million are those of the embedding."""
GRADIENT_BYTES = 4 * 151936 * 896


def _fleet(gbit: float, **of_pools: object) -> Fleet:
    wire = Wire(bandwidth_bytes_per_s=gbit * 1e9 / 8, latency_s=1e-4)
    pools = (
        Pool(name=name, kind=kind, nodes=1, devices_per_node=1, memory_bytes=24 * 10**9, inside=None, between=wire)
        for name, kind in (("new", "RTX-4090"), ("old", "RTX-3090"))
    )
    return Fleet(name="two", pools=tuple(replace(pool, **of_pools) for pool in pools))


def _predictor(fleet: Fleet, model: Transformer) -> Predictor:
    costs = predicted_layers(model, fleet, precision="bf16")
    return Predictor(fleet=fleet, tables=Tables(costs), global_batch=16)


CUT = Template(
    micro_batch=2,
    stages=(
        TemplateStage(pool="new", start=0, stop=15),
        TemplateStage(pool="old", start=15, stop=26),
    ),
)


def test_two_machines_that_hold_the_shared_weights_sum_their_gradient() -> None:
    """Twice half of it goes each way: 545 MB in fp32 over 125 MB/s."""
    fleet = _fleet(1.0)
    tied, own = (_predictor(fleet, replace(SMALL, tied=tied)) for tied in (True, False))
    ((with_sum, _), (without, _)) = (p.sync_and_update_s(((CUT, 1),), "stages", 0) for p in (tied, own))
    assert with_sum - without == pytest.approx(GRADIENT_BYTES / 125e6 + 2e-4)
    whole = Template(micro_batch=2, stages=(TemplateStage(pool="new", start=0, stop=26),))
    (tied_sync, tied_update), (own_sync, own_update) = (
        p.sync_and_update_s(((whole, 1),), "stages", 0) for p in (tied, own)
    )
    assert tied_sync == own_sync == 0.0
    assert tied_update < own_update  # one matrix, not two


def test_over_a_slow_link_shared_weights_stay_on_one_machine() -> None:
    """Cutting the model would be faster than one device by what they compute, and is not by what they sum."""
    fleet = _fleet(1.0)
    cuts = []
    for tied in (True, False):
        costs = predicted_layers(replace(SMALL, tied=tied), fleet, precision="bf16")
        found = FleetPlanner(fleet=fleet, costs=costs, global_batch=32).plan()
        cuts.append(max(len(group.template.stages) for group in found.best.plan.groups))
        # What comes next differs in more than the order of its places.
        kinds = [
            sorted(
                (group.replicas, sorted(home.pool for home in group.template.homes)) for group in weighed.plan.groups
            )
            for weighed in (found.best, *found.runners_up)
        ]
        assert len(kinds) > 1
        assert all(one != other for number, one in enumerate(kinds) for other in kinds[:number])
    assert cuts == [1, 2]


def test_who_pays_for_traffic_pays_for_the_sum() -> None:
    fleet = replace(_fleet(1.0, usd_per_device_hour=0.0), usd_per_byte={("new", "old"): 1e-9})
    paid = []
    for tied in (True, False):
        weighed = _predictor(fleet, replace(SMALL, tied=tied)).evaluate(((CUT, 1),))
        assert weighed is not None
        assert weighed.predicted.usd is not None
        paid.append(weighed.predicted.usd)
    assert paid[0] - paid[1] == pytest.approx(2 * GRADIENT_BYTES * 1e-9)
