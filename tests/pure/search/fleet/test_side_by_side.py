"""Over many devices, a plan is never slower than what its pools do alone, side by side."""

from __future__ import annotations

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.predictor.from_config import transformer_of
from heterodyne.predictor.layer_costs import predicted_layers
from heterodyne.search.fleet.plan import mix_of
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.space import Space

MODEL = transformer_of(
    {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 8192,
     "vocab_size": 32000}, seq=1024,
)  # fmt: skip
FAST = Wire(bandwidth_bytes_per_s=5e10, latency_s=1e-5)


def test_pools_together_are_no_slower_than_beside_each_other() -> None:
    pools = tuple(
        Pool(
            name=kind[:4], kind=kind, nodes=80, devices_per_node=8, memory_bytes=30 * 10**9,
            inside=Wire(bandwidth_bytes_per_s=1.24e11, latency_s=5e-6), between=FAST, place=(kind[:4],),
        )
        for kind in ("A100-SXM-80GB", "V100-SXM2-32GB")
    )  # fmt: skip
    fleet = Fleet(name="many", pools=pools, links={("A100", "V100"): FAST})
    planner = FleetPlanner(fleet=fleet, costs=predicted_layers(MODEL, fleet), global_batch=4096)
    best = planner.plan().best
    alone = [planner.plan(space=Space(pools=(pool.name,))).best for pool in pools]
    assert best.predicted.step_s <= min(own.predicted.step_s for own in alone)
    parts = [(group.template, group.replicas) for own in alone for group in own.plan.groups]
    together = planner.search(Space()).evaluate(mix_of(parts))
    assert together is None or best.predicted.step_s <= together.predicted.step_s * (1 + 1e-9)
