"""What a captured model costs in parts on several devices, against theory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cost.graph_layers import GraphLayers
from heterodyne.cost.layers import Widths
from heterodyne.frontend import capture
from heterodyne.graph.ir import ModelGraph
from heterodyne.predictor.datasheet_times import datasheet_times, graph_layers

KIND = "A100-SXM-80GB"
POOL = Pool(name="a", kind=KIND, nodes=1, devices_per_node=8, memory_bytes=2**36)
WIDTH, TOKENS, SAMPLES = 512, 128, 4
ACTIVATION = 4 * SAMPLES * TOKENS * WIDTH
"""Bytes of what goes from layer to layer."""


@cache
def llama() -> ModelGraph:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=WIDTH,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=TOKENS,
        use_cache=False,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64, device="meta")
    return capture(model, {"input_ids": tokens, "labels": tokens})


def layers_of(graph: ModelGraph, link: float | None = None) -> GraphLayers:
    """``link``: bytes/s of a device towards the others, without any latency."""
    made = datasheet_times(graph, Fleet(name="one kind", pools=(POOL,)))
    if link is None:
        return GraphLayers(made)
    network = replace(made.networks[KIND], inside_bytes_per_s=link, inside_latency_s=0.0)
    return GraphLayers(replace(made, networks={KIND: network}))


def inner(layers: GraphLayers) -> str:
    """The kind of the blocks of which there are most."""
    return max(layers.layers, key=layers.layers.count)


@pytest.mark.parametrize("widths", [Widths(2), Widths(4), Widths(8), Widths(context=2), Widths(context=4)])
def test_devices_together_do_and_hold_no_less_than_one_that_has_it_all(widths: Widths) -> None:
    layers = layers_of(llama())
    for kind in dict.fromkeys(layers.layers):
        whole, part = layers.cost(KIND, kind, Widths(), SAMPLES), layers.cost(KIND, kind, widths, SAMPLES)
        assert whole is not None
        assert part is not None
        assert part.forward_s * widths.devices >= whole.forward_s
        assert part.backward_s * widths.devices >= whole.backward_s
        assert part.parameter_bytes * widths.tensor >= whole.parameter_bytes
        assert part.parameter_bytes <= whole.parameter_bytes
        assert part.kept_bytes * widths.devices >= whole.kept_bytes
        assert part.output_bytes == whole.output_bytes


def test_weights_and_activations_get_smaller() -> None:
    layers = layers_of(llama())
    kind = inner(layers)
    whole, split, context = (layers.cost(KIND, kind, own, SAMPLES) for own in (Widths(), Widths(4), Widths(context=4)))
    assert whole is not None
    assert split is not None
    assert context is not None
    # All but norms and some biases is in parts.
    assert split.parameter_bytes < 0.3 * whole.parameter_bytes
    assert split.optimizer_bytes < 0.3 * whole.optimizer_bytes
    assert split.kept_bytes < 0.7 * whole.kept_bytes
    assert context.parameter_bytes == whole.parameter_bytes
    assert context.kept_bytes < 0.7 * whole.kept_bytes


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_layer_exchanges_two_all_reduces_forward_and_two_back(parts: int) -> None:
    """Shoeybi et al. (2019), section 3: one behind attention, one behind the MLP; so much by whatever collectives."""
    slow, fast = (layers_of(llama(), link) for link in (1e6, 1e18))
    kind = inner(slow)
    one, other = slow.cost(KIND, kind, Widths(parts), SAMPLES), fast.cost(KIND, kind, Widths(parts), SAMPLES)
    assert one is not None
    assert other is not None
    sent = 2 * 2 * (parts - 1) / parts * ACTIVATION / 1e6
    assert one.forward_s - other.forward_s == pytest.approx(sent, rel=0.01)
    assert one.backward_s - other.backward_s == pytest.approx(sent, rel=0.35)


def test_parts_of_a_sequence_exchange_keys_and_values() -> None:
    slow, fast = (layers_of(llama(), link) for link in (1e6, 1e18))
    kind = inner(slow)
    one, other = (own.cost(KIND, kind, Widths(context=4), SAMPLES) for own in (slow, fast))
    assert one is not None
    assert other is not None
    gathered = 3 / 4 * 2 * ACTIVATION / 1e6
    assert one.forward_s - other.forward_s == pytest.approx(gathered, rel=0.01)


def test_a_slower_link_never_makes_a_part_faster() -> None:
    slow, fast = (layers_of(llama(), link) for link in (1e8, 1e9))
    for widths in slow.widths(KIND):
        for kind in dict.fromkeys(slow.layers):
            one, other = slow.cost(KIND, kind, widths, SAMPLES), fast.cost(KIND, kind, widths, SAMPLES)
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.forward_s >= other.forward_s
                assert one.backward_s >= other.backward_s


def test_samples_are_shared_beside_parts() -> None:
    layers = layers_of(llama())
    for kind in dict.fromkeys(layers.layers):
        both, one = layers.cost(KIND, kind, Widths(2, data=2), 2 * SAMPLES), layers.cost(KIND, kind, Widths(2), SAMPLES)
        assert one is not None
        assert both == replace(one, output_bytes=2 * one.output_bytes)
        assert layers.cost(KIND, kind, Widths(2, data=2), 3) is None


def test_parts_stay_in_a_node() -> None:
    small = replace(POOL, nodes=4, devices_per_node=2)
    found = graph_layers(llama(), Fleet(name="pairs", pools=(small,))).widths(KIND)
    assert max(own.tensor for own in found) == max(own.context for own in found) == 2
    assert Widths(2, data=2) not in found


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        x.mul_(2.0)
        return (x**2).mean()


def test_a_model_that_cannot_be_cut_has_no_parts_or_honest_ones() -> None:
    with torch.device("meta"):
        graph = capture(InPlace(), {"x": torch.zeros(4, 8, device="meta")})
    layers = layers_of(graph)
    for widths in layers.widths(KIND):
        for kind in dict.fromkeys(layers.layers):
            whole, part = layers.cost(KIND, kind, Widths(), 8), layers.cost(KIND, kind, widths, 8)
            assert whole is not None
            if part is not None and widths.tensor > 1:
                assert part.parameter_bytes * widths.tensor >= whole.parameter_bytes
