"""Text models of Transformers."""

from __future__ import annotations

from typing import Any

import torch

from unseen.family import (
    NO_GRAPH,
    NOT_IN_A_CUT_PLAN,
    OWN_BACKWARD,
    VOCABULARY,
    Batch,
    Family,
    classes,
    labelled,
    masked,
    of_config,
    tokens,
)

__all__ = ["FAMILIES"]

TINY: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
PAIRS: dict[str, Any] = dict(**TINY, intermediate_size=24, max_position_embeddings=32)
GROUPED: dict[str, Any] = dict(**PAIRS, num_key_value_heads=2, head_dim=4)
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIDES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    max_position_embeddings=32,
    decoder_start_token_id=2,
    forced_eos_token_id=2,
    **SPECIAL,
)


def causal(name: str, model: str, config: str | None = None, /, **values: Any) -> Family:
    return Family(name=name, build=of_config(model, config, **values), batch=labelled)


def encoder(name: str, model: str, **values: Any) -> Family:
    return Family(name=name, build=of_config(model, **{**PAIRS, **values}), batch=labelled)


def _sides(samples: int) -> Batch:
    return {**tokens(samples), "labels": masked(torch.randint(3, VOCABULARY, (samples, 6)))}


def _all_labelled(samples: int) -> Batch:
    """mBART puts the last label first, so a sample has one at least."""
    batch = _sides(samples)
    batch["labels"][0, 2:4] = 7
    return batch


def _per_sample(samples: int) -> Batch:
    return {**tokens(samples), "labels": classes(samples)}


def _per_token(samples: int) -> Batch:
    return {**tokens(samples), "labels": masked(torch.randint(0, 5, (samples, 8)))}


def _pretraining(samples: int) -> Batch:
    return {**labelled(samples), "next_sentence_label": classes(samples, 2)}


def _order(samples: int) -> Batch:
    return {**labelled(samples), "sentence_order_label": classes(samples, 2)}


def _spans(samples: int) -> Batch:
    starts, ends = torch.randint(0, 6, (samples,)), torch.randint(0, 6, (samples,))
    ends[1] = 9  # outside of the text: is ignored
    return {**tokens(samples), "start_positions": starts, "end_positions": ends}


def _choices(samples: int) -> Batch:
    return {"input_ids": torch.randint(3, VOCABULARY, (samples, 3, 8)), "labels": classes(samples, 3)}


def _several_labels(samples: int) -> Batch:
    return {**tokens(samples), "labels": (torch.rand(samples, 5) < 0.4).float()}


def _regression(samples: int) -> Batch:
    return {**tokens(samples), "labels": torch.randn(samples)}


def _replaced(samples: int) -> Batch:
    return {**tokens(samples), "labels": torch.randint(0, 2, (samples, 8))}


def _without_mask(samples: int) -> Batch:
    return labelled(samples, padded=False)


GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
BERT: dict[str, Any] = {**PAIRS, "num_labels": 5}

FAMILIES = (
    causal("Llama", "LlamaForCausalLM", **GROUPED),
    causal("Llama, tied", "LlamaForCausalLM", **GROUPED, tie_word_embeddings=True),
    causal("Qwen2", "Qwen2ForCausalLM", **PAIRS, num_key_value_heads=2),
    causal("Qwen3", "Qwen3ForCausalLM", **GROUPED),
    causal(
        "Qwen3-MoE", "Qwen3MoeForCausalLM", **GROUPED, moe_intermediate_size=12, num_experts=6, num_experts_per_tok=3
    ),
    causal("Mistral", "MistralForCausalLM", **GROUPED, sliding_window=4),
    causal("Mixtral", "MixtralForCausalLM", **GROUPED, num_local_experts=5),
    Family(
        name="Mixtral, router loss",
        build=of_config("MixtralForCausalLM", **GROUPED, num_local_experts=5, output_router_logits=True),
        batch=_without_mask,
        impossible=NOT_IN_A_CUT_PLAN,
    ),
    causal("Gemma 2", "Gemma2ForCausalLM", **GROUPED, sliding_window=4),
    causal("Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, sliding_window=4),
    causal("Phi-3", "Phi3ForCausalLM", **PAIRS, num_key_value_heads=2, **SPECIAL),
    causal("GPT-2", "GPT2LMHeadModel", **GPT2),
    causal("GPT-NeoX", "GPTNeoXForCausalLM", **PAIRS),
    causal("GPT-J", "GPTJForCausalLM", **GPT2, rotary_dim=4),
    causal(
        "OPT", "OPTForCausalLM", **{**TINY, "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16}
    ),
    Family(
        name="Bloom",
        build=of_config("BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=4),
        batch=labelled,
        impossible=OWN_BACKWARD,
    ),
    causal("Falcon", "FalconForCausalLM", **TINY, multi_query=True),
    causal("OLMo 2", "Olmo2ForCausalLM", **PAIRS, num_key_value_heads=2),
    causal("Mamba", "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4),
    Family(
        name="T5",
        build=of_config(
            "T5ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=16,
            d_ff=24,
            d_kv=4,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        ),
        batch=_sides,
    ),
    Family(name="BART", build=of_config("BartForConditionalGeneration", **SIDES), batch=_sides),
    Family(name="mBART", build=of_config("MBartForConditionalGeneration", "MBartConfig", **SIDES), batch=_all_labelled),
    Family(name="Marian", build=of_config("MarianMTModel", "MarianConfig", **SIDES), batch=_sides),
    Family(name="Pegasus", build=of_config("PegasusForConditionalGeneration", **SIDES), batch=_sides),
    encoder("BERT, masked", "BertForMaskedLM"),
    Family(name="BERT, pretraining", build=of_config("BertForPreTraining", **BERT), batch=_pretraining),
    Family(name="BERT, question answering", build=of_config("BertForQuestionAnswering", **PAIRS), batch=_spans),
    Family(name="BERT, sequences", build=of_config("BertForSequenceClassification", **BERT), batch=_per_sample),
    Family(
        name="BERT, several labels", build=of_config("BertForSequenceClassification", **BERT), batch=_several_labels
    ),
    Family(
        name="BERT, regression",
        build=of_config("BertForSequenceClassification", **PAIRS, num_labels=1),
        batch=_regression,
    ),
    Family(name="BERT, tokens", build=of_config("BertForTokenClassification", **BERT), batch=_per_token),
    Family(name="BERT, choices", build=of_config("BertForMultipleChoice", **PAIRS), batch=_choices),
    Family(
        name="GPT-2, sequences",
        build=of_config("GPT2ForSequenceClassification", "GPT2Config", **GPT2, num_labels=5, pad_token_id=0),
        batch=_per_sample,
    ),
    encoder("RoBERTa", "RobertaForMaskedLM", **SPECIAL),
    Family(
        name="DistilBERT",
        build=of_config(
            "DistilBertForMaskedLM",
            vocab_size=VOCABULARY,
            dim=16,
            hidden_dim=24,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=32,
        ),
        batch=labelled,
    ),
    encoder("ALBERT", "AlbertForMaskedLM", embedding_size=8),
    Family(
        name="ALBERT, pretraining", build=of_config("AlbertForPreTraining", **PAIRS, embedding_size=8), batch=_order
    ),
    encoder("ELECTRA, masked", "ElectraForMaskedLM", embedding_size=8),
    Family(
        name="ELECTRA",
        build=of_config("ElectraForPreTraining", **PAIRS, embedding_size=8),
        batch=_replaced,
        impossible=NO_GRAPH,
        count=lambda part: part["attention_mask"].sum(),
    ),
    encoder("DeBERTa v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    Family(
        name="XLNet",
        build=of_config(
            "XLNetLMHeadModel", "XLNetConfig", vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=4, d_inner=24
        ),
        batch=labelled,
    ),
    encoder("ModernBERT", "ModernBertForMaskedLM", **SPECIAL, local_attention=4, cls_token_id=1, sep_token_id=2),
)
