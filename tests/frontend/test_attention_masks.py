"""The masks of Transformers' models, which decide whether a stage takes flash kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heterodyne.frontend.as_in_a_run import as_in_a_run
from heterodyne.frontend.trace import capture
from heterodyne.graph.ir import Op

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(1, 64, (4, 16))


def attention_of(config: Any, auto: str = "AutoModelForCausalLM", **batch: torch.Tensor) -> list[Op]:
    model = getattr(transformers, auto).from_config(config)
    graph = capture(model, {"input_ids": TOKENS, **batch})
    return [op for op in graph.ops if op.kind == "scaled_dot_product_attention"]


def mistral(window: int | None) -> Any:
    return transformers.MistralConfig(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        sliding_window=window,
    )


def masked(op: Op) -> bool:
    return len(op.operands) > 3


@pytest.mark.parametrize("window", [None, 17])
def test_a_causal_mask_is_an_argument(window: int | None) -> None:
    (attention,) = attention_of(mistral(window), labels=TOKENS)
    assert attention.argument("is_causal") is True
    assert not masked(attention)


def test_windows_and_padding_are_masks() -> None:
    (attention,) = attention_of(mistral(8), labels=TOKENS)
    assert masked(attention)
    (attention,) = attention_of(mistral(None), labels=TOKENS, attention_mask=torch.ones_like(TOKENS))
    assert masked(attention)


def test_attention_to_all_has_no_mask() -> None:
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64
    )
    (attention,) = attention_of(config, "AutoModelForMaskedLM", labels=TOKENS)
    assert attention.argument("is_causal") is False
    assert not masked(attention)


def test_what_others_have_registered_is_asked_and_put_back() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS

    before = MASKS["sdpa"]
    asked: list[int] = []

    def own(*args: Any, **options: Any) -> None:
        asked.append(options["q_length"])

    with as_in_a_run():
        pass
    assert MASKS["sdpa"] is before
    MASKS["sdpa"] = own
    try:
        with as_in_a_run():
            MASKS["sdpa"](q_length=4, kv_length=8)
            MASKS["sdpa"](q_length=8, kv_length=8)
        assert asked == [4]
        assert MASKS["sdpa"] is own
    finally:
        del MASKS["sdpa"]
    assert MASKS["sdpa"] is before
