"""Tables of layers add up to the model, and shapes come from configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import Widths
from heterodyne.errors import ClusterError, JobError
from heterodyne.predictor.from_config import says_shape, transformer_of
from heterodyne.predictor.layer_costs import PredictedLayers, predicted_layers
from heterodyne.predictor.transformer import Transformer

LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
NVLINK = Wire(bandwidth_bytes_per_s=300e9, latency_s=5e-6)
FLEET = Fleet(
    name="two kinds",
    pools=(
        Pool(name="new", kind="A100-SXM-80GB", nodes=2, devices_per_node=8, memory_bytes=80 * 10**9, inside=NVLINK),
        Pool(name="old", kind="V100-SXM2-16GB", nodes=1, devices_per_node=4, memory_bytes=16 * 10**9, inside=NVLINK),
    ),
)


def table(model: Transformer) -> PredictedLayers:
    return predicted_layers(model, FLEET)


def test_a_configuration_is_read_as_the_model_that_it_describes() -> None:
    assert transformer_of(LLAMA3_8B, seq=8192).parameters == pytest.approx(8.03e9, rel=0.005)
    mixtral = {
        **LLAMA3_8B,
        "model_type": "mixtral",
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    assert transformer_of(mixtral, seq=4096).parameters == pytest.approx(46.7e9, rel=0.005)
    gpt2 = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257}
    assert transformer_of(gpt2, seq=1024).parameters == pytest.approx(1.55e9, rel=0.01)


def test_a_configuration_that_does_not_say_enough_is_refused() -> None:
    with pytest.raises(JobError, match=r"how many layers .* num_hidden_layers.* 'model.huggingface'"):
        transformer_of({"model_type": "llama", "hidden_size": 64}, seq=8)
    assert not says_shape({"model_type": "llama", "hidden_size": 64})
    assert says_shape(LLAMA3_8B)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": -7},
        {"hidden_size": 0},
        {"vocab_size": "32000"},
        {"num_key_value_heads": 2.5},
        {"num_experts": -1},
    ],
)
def test_a_configuration_counts_in_whole_numbers(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(JobError, match=f"{name}: .* no whole number"):
        transformer_of({**LLAMA3_8B, **wrong}, seq=8)


def test_parameters_of_all_layers_are_those_of_the_model() -> None:
    model = transformer_of({**LLAMA3_8B, "num_local_experts": 8, "num_experts_per_tok": 2}, seq=1024)
    layers = table(model)
    for width in (1, 4):
        costs = [layers.cost("A100-SXM-80GB", layer, Widths(width), 1) for layer in layers.layers]
        held = sum(cost.parameter_bytes for cost in costs if cost is not None)
        assert width * held == pytest.approx(2 * model.parameters, rel=1e-6)


def _tensor(model: Transformer, kind: str) -> list[int]:
    return sorted({widths.tensor for widths in table(model).widths(kind)})


def test_tensor_widths_divide_heads_and_stay_in_a_node() -> None:
    model = transformer_of(LLAMA3_8B, seq=1024)
    assert _tensor(model, "A100-SXM-80GB") == [1, 2, 4, 8]
    assert _tensor(model, "V100-SXM2-16GB") == [1, 2, 4]
    assert _tensor(replace(model, kv_heads=2), "A100-SXM-80GB") == [1, 2]
    assert table(model).widths("H20") == ()
    assert table(model).cost("A100-SXM-80GB", "block", Widths(3), 1) is None
    assert table(model).cost("A100-SXM-80GB", "block with experts", Widths(), 1) is None


def test_experts_may_be_in_every_second_layer() -> None:
    model = replace(transformer_of(LLAMA3_8B, seq=1024), layers=4, experts=4, moe_every=2)
    assert table(model).layers == ("embedding", "block", "block with experts", "block", "block with experts", "head")


def test_a_device_whose_datasheet_is_silent_is_refused() -> None:
    silent = Fleet(
        name="x", pools=(Pool(name="a", kind="Ascend-910A", nodes=1, devices_per_node=8, memory_bytes=2**35),)
    )
    with pytest.raises(ClusterError, match="memory bandwidth of Ascend-910A"):
        predicted_layers(transformer_of(LLAMA3_8B, seq=8), silent)
