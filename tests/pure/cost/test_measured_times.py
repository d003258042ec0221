"""A small profile, scaled to kinds: seconds as measured, bytes of the graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cluster.profile import Profile
from heterodyne.cost.graph_layers import GraphLayers
from heterodyne.cost.layers import Widths
from heterodyne.cost.measured_times import MeasuredTimes, kind_of
from heterodyne.errors import MeasureError
from pure.build import cluster, graph, linear, profile

MODEL = graph(3)
CLUSTER = cluster(2)


def measured() -> MeasuredTimes:
    found = profile(MODEL, CLUSTER, [linear(0.1), linear(0.2)])
    renamed = {"a/A100:0": found.devices[CLUSTER.devices[0].id], "a/V100:0": found.devices[CLUSTER.devices[1].id]}
    return MeasuredTimes(graph=MODEL, profile=Profile(key="x", devices=renamed))


def test_the_kind_of_a_device_is_in_its_id() -> None:
    assert kind_of("old-0/V100-SXM2-16GB:3") == "V100-SXM2-16GB"


def test_each_kind_has_the_seconds_of_its_device() -> None:
    layers = GraphLayers(measured())
    fast, slow = (layers.cost(kind, "layer", Widths(), 4) for kind in ("A100", "V100"))
    assert fast is not None
    assert slow is not None
    assert slow.forward_s == pytest.approx(2 * fast.forward_s)
    assert slow.parameter_bytes == fast.parameter_bytes


def test_all_layers_together_take_what_the_model_takes() -> None:
    layers = GraphLayers(measured())
    costs = [layers.cost("A100", kind, Widths(), 2) for kind in layers.layers]
    found = sum(cost.forward_s + cost.backward_s for cost in costs if cost is not None)
    assert found == pytest.approx(measured().compute["A100"].micro_batch_s(2))
    assert sum(cost.parameter_bytes for cost in costs if cost is not None) == MODEL.parameter_bytes


def test_what_was_not_measured_is_not_known() -> None:
    layers = GraphLayers(measured())
    assert layers.widths("H100") == ()
    assert layers.cost("H100", "layer", Widths(), 1) is None
    assert layers.cost("A100", "layer", Widths(2), 1) is None
    assert layers.cost("A100", "layer", Widths(), 10**6) is None
    assert layers.cost("A100", "layer", Widths(data=2), 3) is None


def test_a_profile_of_another_model_or_of_other_devices_is_refused() -> None:
    found = measured().profile
    other = replace(MODEL, blocks=tuple(replace(block, kind=f"other {block.kind}") for block in MODEL.blocks))
    with pytest.raises(MeasureError, match=r"block kinds .* were not measured; measure this model again"):
        MeasuredTimes(graph=other, profile=found).largest("A100")
    found.require({"a/A100:0": "fp32"})
    with pytest.raises(MeasureError, match="knows nothing of b/A100:1; it is of a/A100:0, a/V100:0: measure again"):
        found.require({"a/A100:0": "fp32", "b/A100:1": "fp32"})
    with pytest.raises(
        MeasureError,
        match=r"is of a/A100:0 in fp32, and is asked for bf16 by the job or the plan: measure again with .*precision bf16",
    ):
        found.require({"a/A100:0": "bf16"})


def test_devices_that_share_a_micro_batch_take_what_one_takes_for_its_part() -> None:
    layers = GraphLayers(measured())
    shared, one = layers.cost("A100", "layer", Widths(data=2), 4), layers.cost("A100", "layer", Widths(), 2)
    assert one is not None
    assert shared == replace(one, output_bytes=2 * one.output_bytes)


def test_of_a_graph_the_weights_that_two_blocks_read_are_the_tied_ones() -> None:
    head = replace(MODEL.ops[-1], parameters=("embed.weight",))
    model = replace(MODEL, ops=(*MODEL.ops[:-1], head), parameters=MODEL.parameters[:-1])
    found = profile(model, CLUSTER, [linear(0.1), linear(0.2)])
    times = MeasuredTimes(
        graph=model, profile=Profile(key="x", devices={"a/A100:0": found.devices[CLUSTER.devices[0].id]})
    )
    layers = GraphLayers(times)
    costs = [layers.cost("A100", kind, Widths(), 2) for kind in layers.layers]
    own = [cost.tied_bytes for cost in costs if cost is not None]
    assert own == [model.parameters[0].bytes, 0, 0, 0, model.parameters[0].bytes]
