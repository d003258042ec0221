"""The shape of a transformer from the fields of a Transformers configuration, without building the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heterodyne.errors import JobError
from heterodyne.predictor.transformer import Transformer

__all__ = ["says_shape", "transformer_of"]

_GATED = ("llama", "mistral", "mixtral", "qwen", "gemma", "phi3", "olmo", "deepseek", "granite")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab": ("vocab_size",),
}


def says_shape(config: Mapping[str, Any]) -> bool:
    """Whether it has all that a shape needs; a recurrent model has no heads, and what is left out is what Transformers takes then."""
    return all(any(config.get(name) is not None for name in names) for names in _FIELDS.values())


def transformer_of(config: Mapping[str, Any], *, seq: int) -> Transformer:
    """Of a configuration with ``model_type`` and its usual fields, for samples of so many tokens.

    Raises JobError, with the names that were looked for, where a field is not there, and with the field where it is no whole number.
    """
    kind = str(config.get("model_type", ""))
    found = {name: _needed(config, name, names) for name, names in _FIELDS.items()}
    gated = any(kind.startswith(word) for word in _GATED)
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts") or 0
    head_dim, kv_heads = _first(config, "head_dim"), _first(config, "num_key_value_heads")
    free = any("head_dim" in name or name == "d_kv" for name in config)  # heads are of a size of their own
    for whole, parts, what in (
        (found["hidden"], 1 if free else found["heads"], "the hidden size"),
        (found["heads"], kv_heads or 1, "the number of heads"),
    ):
        if whole % parts:
            raise JobError(f"the model's configuration: {what}, {whole}, is no multiple of {parts} heads")
    dense = _first(config, "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * found["hidden"]
    inner = _first(config, "moe_intermediate_size") or dense
    return Transformer(
        layers=found["layers"],
        hidden=found["hidden"],
        heads=found["heads"],
        vocab=found["vocab"],
        seq=seq,
        ffn=inner if experts else dense,
        kv_heads=kv_heads,
        head_dim=head_dim,
        gated=gated,
        experts=experts,
        topk=_first(config, "num_experts_per_tok", "num_experts_per_token") or 1,
        shared_ffn=_first(config, "shared_expert_intermediate_size")
        or inner * (_first(config, "n_shared_experts") or 0),
        causal=kind not in ("bert", "roberta", "electra", "vit", "deberta"),
        tied=bool(config.get("tie_word_embeddings", not gated)),
    )


def _needed(config: Mapping[str, Any], what: str, names: tuple[str, ...]) -> int:
    found = _first(config, *names, least=1)
    if found is None:
        raise JobError(
            f"the model's configuration does not say how many {what} it has (one of {', '.join(names)}); "
            "to plan on paper, give it under 'model.huggingface'"
        )
    return found


def _first(config: Mapping[str, Any], *names: str, least: int = 0) -> int | None:
    """The first of these that the configuration gives, 0 counting as not given where it may be left out."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < least:
            raise JobError(
                f"the model's configuration gives {name}: {value!r}, which is no whole number from {least} on"
            )
        if value:
            return value
    return None
