"""The shape of a transformer from the fields of a Transformers configuration, without building the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heterodyne.errors import JobError
from heterodyne.predictor.transformer import Transformer

__all__ = ["transformer_of"]

_GATED = ("llama", "mistral", "mixtral", "qwen", "gemma", "phi3", "olmo", "deepseek", "granite")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab": ("vocab_size",),
}


def transformer_of(config: Mapping[str, Any], *, seq: int) -> Transformer:
    """Of a configuration with ``model_type`` and its usual fields, for samples of so many tokens.

    Raises JobError, with the names that were looked for, where a field is not there.
    """
    kind = str(config.get("model_type", ""))
    found = {name: _first(config, name, names) for name, names in _FIELDS.items()}
    gated = any(kind.startswith(word) for word in _GATED)
    experts = next((config[n] for n in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(n)), 0)
    dense = next(
        (config[n] for n in ("intermediate_size", "n_inner", "ffn_dim", "d_ff") if config.get(n)), 4 * found["hidden"]
    )
    inner = config.get("moe_intermediate_size") or dense
    return Transformer(
        layers=found["layers"],
        hidden=found["hidden"],
        heads=found["heads"],
        vocab=found["vocab"],
        seq=seq,
        ffn=inner if experts else dense,
        kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        gated=gated,
        experts=experts,
        topk=next((config[n] for n in ("num_experts_per_tok", "num_experts_per_token") if config.get(n)), 1),
        shared_ffn=config.get("shared_expert_intermediate_size") or inner * (config.get("n_shared_experts") or 0),
        causal=kind not in ("bert", "roberta", "electra", "vit", "deberta"),
        tied=bool(config.get("tie_word_embeddings", not gated)),
    )


def _first(config: Mapping[str, Any], what: str, names: tuple[str, ...]) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise JobError(
        f"the model's configuration does not say how many {what} it has (one of {', '.join(names)}); "
        "to plan on paper, give it under 'model.huggingface'"
    )
