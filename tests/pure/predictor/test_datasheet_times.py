"""A captured model costs what its ops cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cost.layers import Widths
from heterodyne.cost.recipe import Recipe
from heterodyne.graph import Size, TensorSpec
from heterodyne.predictor.datasheet_times import graph_layers
from pure.build import graph

FLEET = Fleet(
    name="one kind", pools=(Pool(name="a", kind="A100-SXM-80GB", nodes=1, devices_per_node=8, memory_bytes=2**36),)
)


def test_layers_are_the_blocks_of_the_graph() -> None:
    layers = graph_layers(graph(3), FLEET)
    assert layers.layers == ("embed", "layer", "layer", "layer", "head")
    assert {Widths(data=data) for data in (1, 2, 4, 8)} < set(layers.widths("A100-SXM-80GB"))
    assert layers.widths("H20") == ()
    assert layers.cost("A100-SXM-80GB", "layer", Widths(2, 2), 1) is None, "in one way beside the samples"
    assert layers.cost("H20", "layer", Widths(), 1) is None
    assert layers.cost("A100-SXM-80GB", "layer", Widths(data=2), 3) is None


def test_devices_that_share_a_micro_batch_have_their_part_each_and_send_all_of_it() -> None:
    layers = graph_layers(graph(3), FLEET)
    for kind in set(layers.layers):
        four, one = (
            layers.cost("A100-SXM-80GB", kind, Widths(data=4), 8),
            layers.cost("A100-SXM-80GB", kind, Widths(), 2),
        )
        assert one is not None
        assert four == replace(one, output_bytes=4 * one.output_bytes)


def test_parameters_gradients_and_states_are_counted_once() -> None:
    model = graph(3, width=64)
    layers = graph_layers(model, FLEET)
    costs = [layers.cost("A100-SXM-80GB", kind, Widths(), 4) for kind in layers.layers]
    assert sum(c.parameter_bytes for c in costs if c) == model.parameter_bytes
    assert sum(c.gradient_bytes for c in costs if c) == model.trainable_bytes
    assert sum(c.optimizer_bytes for c in costs if c) == 2 * model.trainable_bytes
    assert sum(c.kept_bytes for c in costs if c) == model.bytes_saved()(4)


def test_more_samples_and_wider_layers_take_longer() -> None:
    narrow, wide = (graph_layers(graph(2, width=width), FLEET) for width in (4096, 16384))
    few, many = (narrow.cost("A100-SXM-80GB", "layer", Widths(), size) for size in (1024, 65536))
    wider = wide.cost("A100-SXM-80GB", "layer", Widths(), 1024)
    assert few is not None
    assert many is not None
    assert wider is not None
    assert few.forward_s < many.forward_s
    assert few.forward_s < wider.forward_s


def test_no_op_is_faster_than_the_device() -> None:
    model = graph(2, width=8192)
    layers = graph_layers(model, FLEET, recipe=Recipe(precision="bf16"))
    cost = layers.cost("A100-SXM-80GB", "layer", Widths(), 4096)
    assert cost is not None
    block = model.blocks[1]
    assert cost.forward_s >= model.flops_forward(block)(4096) / 312e12
    assert cost.backward_s == pytest.approx(2 * cost.forward_s, rel=0.2)


def test_a_convolution_has_its_channels_for_columns() -> None:
    model = graph(1)

    def forward_s(target: str, *shape: Size) -> float:
        """Of a model one of whose ops is another, with the operations of a convolution of 256 channels on 14 x 14 pixels."""
        op = replace(
            model.ops[1],
            target=target,
            outputs=(TensorSpec(shape=shape, dtype="float32"),),
            flops_forward=Size.per_sample(2 * 256 * 14 * 14 * 2304),
        )
        changed = replace(model, ops=(model.ops[0], op, *model.ops[2:]))
        layers = graph_layers(changed, FLEET)
        costs = [layers.cost("A100-SXM-80GB", kind, Widths(), 8) for kind in layers.layers]
        return sum(cost.forward_s for cost in costs if cost)

    image = (Size.per_sample(1), Size.of(256), Size.of(14), Size.of(14))
    as_product = forward_s("aten.linear.default", Size.per_sample(14 * 14), Size.of(256))
    assert forward_s("aten.conv2d.default", *image) == pytest.approx(as_product)
    assert forward_s("aten.linear.default", *image) > as_product
