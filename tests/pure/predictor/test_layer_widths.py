"""What the devices of a stage have each, by how they share it: halves and copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.predictor.constants import constants
from heterodyne.predictor.devices import chip_of, network_of
from heterodyne.predictor.layer_bytes import layer_activation_bytes
from heterodyne.predictor.layer_costs import PredictedLayers, predicted_layers
from heterodyne.predictor.passes import Passes
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.software import Software
from heterodyne.predictor.transformer import Transformer

KIND = "A100-SXM-80GB"
DENSE = Transformer(layers=4, hidden=4096, heads=32, kv_heads=8, vocab=32000, seq=8192, ffn=14336, gated=True)
ROUTED = replace(DENSE, experts=16, topk=2, seq=4096)
BETWEEN = Wire(bandwidth_bytes_per_s=50e9, latency_s=1e-5)
NVLINK = Wire(bandwidth_bytes_per_s=300e9, latency_s=5e-6)


def fleet(between: Wire | None = BETWEEN, nodes: int = 8) -> Fleet:
    pool = Pool(
        name="a", kind=KIND, nodes=nodes, devices_per_node=8, memory_bytes=2**36, inside=NVLINK, between=between
    )
    return Fleet(name="one kind", pools=(pool,))


def table(model: Transformer, of: Fleet | None = None) -> PredictedLayers:
    return predicted_layers(model, of or fleet())


def known(layers: PredictedLayers, layer: str, widths: Widths, micro_batch: int) -> LayerCost:
    cost = layers.cost(KIND, layer, widths, micro_batch)
    assert cost is not None
    return cost


@given(data=st.sampled_from([2, 4, 8]), each=st.integers(1, 3), layer=st.sampled_from(["embedding", "block", "head"]))
def test_devices_that_share_a_micro_batch_are_replicas_with_a_part_of_it(data: int, each: int, layer: str) -> None:
    layers = table(DENSE)
    shared, one = known(layers, layer, Widths(data=data), data * each), known(layers, layer, Widths(), each)
    assert shared == replace(one, output_bytes=data * one.output_bytes)
    assert layers.cost(KIND, layer, Widths(data=data), data * each + 1) is None


@given(context=st.sampled_from([2, 4, 8]), layer=st.sampled_from(["embedding", "block", "head"]))
def test_parts_of_the_sequence_divide_activations_and_copy_parameters(context: int, layer: str) -> None:
    layers = table(DENSE)
    shared, one = known(layers, layer, Widths(context=context), 1), known(layers, layer, Widths(), 1)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "update_s", "output_bytes"):
        assert getattr(shared, name) == getattr(one, name)
    for name in ("kept_bytes", "kept_bytes_recomputed", "workspace_bytes"):
        assert context * getattr(shared, name) == pytest.approx(getattr(one, name))
    assert shared.forward_s >= one.forward_s / context * (1 - 1e-9)
    assert shared.forward_s < one.forward_s


def test_keys_and_values_that_go_round_take_time_that_samples_do_not() -> None:
    for tensor in (1, 2):
        shared = known(table(DENSE), "block", Widths(tensor=tensor, data=2), 2)
        handed = known(table(DENSE), "block", Widths(tensor=tensor, context=2), 2)
        assert handed.forward_s > shared.forward_s
        assert handed.kept_bytes == shared.kept_bytes


@given(widths=st.sampled_from([w for w in table(ROUTED).widths(KIND) if w.devices > 1]))
def test_experts_lie_over_all_devices_as_far_as_there_are_experts(widths: Widths) -> None:
    cost = known(table(ROUTED), "block with experts", widths, 4 * widths.data)
    every = 4 * ROUTED.experts * ROUTED.ffn_parameters  # gradients in 32 bits
    assert widths.devices * cost.expert_bytes == pytest.approx(cost.expert_copies * every)
    assert cost.expert_copies == max(1, widths.devices // ROUTED.experts)
    dense = cost.gradient_bytes - cost.expert_bytes
    assert widths.tensor * dense == pytest.approx(4 * (ROUTED.attention_parameters + ROUTED.shared_parameters))


def test_widths_beyond_a_node_are_for_sequences_and_experts() -> None:
    def wide(model: Transformer, of: Fleet) -> set[Widths]:
        return {widths for widths in table(model, of).widths(KIND) if widths.devices > 8}

    assert wide(DENSE, fleet(between=None, nodes=1)) == set()
    assert {widths.data for widths in wide(DENSE, fleet())} == {1}
    assert Widths(data=16) in wide(ROUTED, fleet())
    assert max(widths.devices for widths in wide(replace(ROUTED, seq=1024), fleet())) == 16
    assert max(widths.context for widths in table(DENSE).widths(KIND)) == 8  # 1,024 positions each
    assert all(widths.tensor <= 8 for widths in table(DENSE).widths(KIND))


def test_tokens_that_travel_between_nodes_take_longer_over_slower_links() -> None:
    slow, fast = (
        known(
            table(ROUTED, fleet(replace(BETWEEN, bandwidth_bytes_per_s=gbps))),
            "block with experts", Widths(data=16), 16,
        )
        for gbps in (5e9, 100e9)
    )  # fmt: skip
    assert slow.forward_s > fast.forward_s
    outside = (
        2 * ROUTED.seq * ROUTED.topk * ROUTED.hidden * 2 / 2 * 8
    )  # twice, half of it to the other node, of eight devices
    between = network_of(fleet().accelerator(KIND), 8, between_bytes_per_s=1.0).between_bytes_per_s
    assert slow.forward_s - fast.forward_s == pytest.approx(outside / between * (1 / 5e9 - 1 / 100e9), rel=0.01)


@pytest.mark.parametrize(
    ("model", "widths", "degrees"),
    [
        (DENSE, Widths(context=2), {"cp": 2}),
        (DENSE, Widths(tensor=2, context=4), {"tp": 2, "cp": 4, "sequence_parallel": True}),
        (DENSE, Widths(context=2, data=2), {"cp": 2}),
        (ROUTED, Widths(data=8), {"ep": 8}),
        (ROUTED, Widths(data=16), {"ep": 16}),
        (ROUTED, Widths(context=2, data=4), {"cp": 2, "ep": 8}),
        (ROUTED, Widths(tensor=4, data=2), {"tp": 4, "ep": 8, "sequence_parallel": True}),
    ],
)
def test_the_devices_of_a_stage_run_a_layer_as_such_a_group_does(
    model: Transformer, widths: Widths, degrees: dict[str, int]
) -> None:
    """Seconds are those of its kernels and exchanges, and of adding gradients up."""
    routed = bool(model.experts)
    cost = known(table(model), "block with experts" if routed else "block", widths, widths.data)
    setup = Setup(micro_batch=1, **degrees)  # type: ignore[arg-type]
    device = fleet().accelerator(KIND)
    chip = chip_of(device, "bf16", Software())
    network = network_of(device, 8, inside_bytes_per_s=300e9, between_bytes_per_s=50e9)
    told = Passes(model=model, setup=setup, chip=chip, network=network, known=constants())
    forward, backward = told.layer_of(experts=routed)
    parameters = sum(told.layer_held(experts=routed))
    assert cost.forward_s == pytest.approx(forward)
    assert cost.backward_s == pytest.approx(backward + parameters * 10 / chip.memory_bytes_per_s)
    assert cost.update_s == pytest.approx(parameters * 30 / chip.memory_bytes_per_s)
    assert cost.kept_bytes == pytest.approx(layer_activation_bytes(model, setup, experts=routed)[0])
