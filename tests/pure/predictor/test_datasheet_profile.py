"""A profile from datasheets says of a device what the table of layer costs says of its kind."""

from __future__ import annotations

import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.compute import compute_of
from heterodyne.cost.layers import Widths
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.predictor.datasheet_profile import believed_cluster, datasheet_profile
from heterodyne.predictor.datasheet_times import graph_layers
from pure.build import graph

FLEET = Fleet(
    name="two kinds",
    pools=(
        Pool(name="a", kind="A100-SXM-80GB", nodes=1, devices_per_node=2, memory_bytes=2**36),
        Pool(name="v", kind="V100-SXM2-16GB", nodes=1, devices_per_node=1, memory_bytes=2**34),
    ),
    links={("a", "v"): Wire(bandwidth_bytes_per_s=1e9, latency_s=1e-3)},
)
MODEL = graph(3, width=256)
SIZES = (1, 2, 8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_seconds_and_bytes_are_those_of_the_layers(precision: str) -> None:
    recipe = Recipe(precision="bf16" if precision == "bf16" else "fp32")
    layers = graph_layers(MODEL, FLEET, recipe=recipe)
    profile = datasheet_profile(MODEL, FLEET, sizes=SIZES, recipe=recipe)
    cluster = believed_cluster(FLEET)
    believed = CostModel(graph=MODEL, cluster=cluster, profile=profile, recipe=recipe)
    assert [device.id for device in cluster.devices] == list(profile.devices)
    for device in cluster.devices:
        compute = compute_of(MODEL, device.id, profile.devices[device.id])
        for size in SIZES:
            costs = [layers.cost(device.kind, kind, Widths(), size) for kind in layers.layers]
            assert compute.micro_batch_s(size) == pytest.approx(sum(c.forward_s + c.backward_s for c in costs if c))
        updates = [layers.cost(device.kind, kind, Widths(), 1) for kind in layers.layers]
        assert believed.update_s(device.id) == pytest.approx(sum(c.update_s for c in updates if c))
        assert believed.update_s(device.id, on_host=True) > believed.update_s(device.id)


def test_links_are_what_collectives_reach_of_them() -> None:
    cluster = believed_cluster(FLEET)
    link = cluster.link("a-0/A100-SXM-80GB:0", "v-0/V100-SXM2-16GB:0")
    assert link is not None
    assert link.bandwidth_bytes_per_s < 1e9
    assert link.latency_s == 1e-3
    inside = cluster.link("a-0/A100-SXM-80GB:0", "a-0/A100-SXM-80GB:1")
    assert inside is not None, "as on the datasheet, where the file says nothing"
