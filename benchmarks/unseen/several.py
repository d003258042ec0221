"""Models of sound, of series over time, and of several kinds of input."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unseen.family import (
    NO_GRAPH,
    NOT_IN_A_CUT_PLAN,
    VOCABULARY,
    Batch,
    Family,
    classes,
    image,
    labelled,
    masked,
    of_config,
    tokens,
)
from unseen.text import GROUPED, PAIRS, SIDES, SPECIAL, TINY

__all__ = ["FAMILIES"]

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
WAVES: dict[str, Any] = dict(
    **TINY, intermediate_size=24, conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2,
    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, mask_feature_prob=0.0, layerdrop=0.0,
    classifier_proj_size=8, apply_spec_augment=False,
)  # fmt: skip


class Towers(nn.Module):
    """Asks for the loss: a batch holds tensors alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


def _towers_of(model: str, **more: Any) -> Any:
    text = {**PAIRS, **SPECIAL}
    build = of_config(model, text_config=text, vision_config=VISION, **more)
    return lambda: Towers(build())


def _pairs(samples: int) -> Batch:
    return {"input_ids": tokens(samples)["input_ids"], "pixel_values": image(samples)}


def _captioned(samples: int) -> Batch:
    return {**labelled(samples), "pixel_values": image(samples)}


def _captions(samples: int) -> Batch:
    return {"pixel_values": image(samples), "labels": masked(torch.randint(3, VOCABULARY, (samples, 6)))}


def _asked(samples: int) -> Batch:
    """Four patches of an image stand in the text."""
    ids = torch.randint(3, VOCABULARY - 1, (samples, 10))
    ids[:, 1:5] = VOCABULARY - 1
    return {"input_ids": ids, "pixel_values": image(samples), "labels": masked(ids.clone())}


def _placed(samples: int) -> Batch:
    corner = torch.randint(0, 10, (samples, 8, 2))
    return {
        **tokens(samples),
        "bbox": torch.cat([corner, corner + 5], -1),
        "labels": masked(torch.randint(0, 5, (samples, 8))),
    }


def _heard(samples: int) -> Batch:
    labels = torch.randint(3, VOCABULARY, (samples, 4))
    labels[1::2, 2:] = -100
    return {"input_values": torch.randn(samples, 200), "labels": labels}


def _recognised(samples: int) -> Batch:
    return {"input_values": torch.randn(samples, 200), "labels": classes(samples)}


def _translated(samples: int, mels: int = 8) -> Batch:
    return {
        "input_features": torch.randn(samples, 16, mels),
        "labels": masked(torch.randint(3, VOCABULARY, (samples, 6))),
    }


def _whispered(samples: int) -> Batch:
    return {"input_features": torch.randn(samples, 8, 32), "labels": masked(torch.randint(3, VOCABULARY, (samples, 6)))}


def _series(samples: int) -> Batch:
    return {"past_values": torch.randn(samples, 16, 2), "future_values": torch.randn(samples, 4, 2)}


def _probable(samples: int) -> Batch:
    return {
        "past_values": torch.randn(samples, 15),
        "past_time_features": torch.randn(samples, 15, 1),
        "past_observed_mask": (torch.rand(samples, 15) < 0.8).float(),
        "future_values": torch.randn(samples, 4),
        "future_time_features": torch.randn(samples, 4, 1),
    }


def _encoder_decoder() -> nn.Module:
    import transformers as t

    encoder = t.ViTConfig(**VISION, hidden_dropout_prob=0.0)
    decoder = t.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return t.VisionEncoderDecoderModel(config)


def _llava() -> nn.Module:
    import transformers as t

    text = t.LlamaConfig(**GROUPED)
    vision = t.CLIPVisionConfig(**VISION)
    config = t.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=VOCABULARY - 1, vision_feature_layer=-1,
    )  # fmt: skip
    return t.LlavaForConditionalGeneration(config)


FAMILIES = (
    Family(
        name="CLIP", build=_towers_of("CLIPModel", projection_dim=8), batch=_pairs, impossible=NOT_IN_A_CUT_PLAN
    ),
    Family(name="SigLIP", build=_towers_of("SiglipModel"), batch=_pairs, impossible=NOT_IN_A_CUT_PLAN),
    Family(
        name="BLIP, captions",
        build=of_config(
            "BlipForConditionalGeneration", text_config={**PAIRS, **SPECIAL, "encoder_hidden_size": 16}, vision_config=VISION
        ),
        batch=_captioned,
    ),
    Family(name="ViT and GPT-2", build=_encoder_decoder, batch=_captions),
    Family(name="LLaVA", build=_llava, batch=_asked, impossible=NO_GRAPH, count=lambda part: (part["labels"][:, 1:] != -100).sum()),
    Family(
        name="LayoutLM",
        build=of_config("LayoutLMForTokenClassification", "LayoutLMConfig", **PAIRS, max_2d_position_embeddings=32, num_labels=5),
        batch=_placed,
    ),
    Family(
        name="Whisper",
        build=of_config(
            "WhisperForConditionalGeneration", **{**SIDES, "max_source_positions": 16, "max_target_positions": 16},
            num_mel_bins=8,
        ),
        batch=_whispered,
    ),
    Family(
        name="Speech2Text",
        build=of_config(
            "Speech2TextForConditionalGeneration", **SIDES, input_feat_per_channel=8, input_channels=1, conv_channels=8,
            max_source_positions=32, max_target_positions=16,
        ),
        batch=_translated,
    ),
    Family(name="Wav2Vec2, CTC", build=of_config("Wav2Vec2ForCTC", **WAVES, **SPECIAL), batch=_heard, impossible=NO_GRAPH, count="sum"),
    Family(
        name="Wav2Vec2, sequences",
        build=of_config("Wav2Vec2ForSequenceClassification", **WAVES, num_labels=5),
        batch=_recognised,
    ),
    Family(
        name="HuBERT, sequences", build=of_config("HubertForSequenceClassification", **WAVES, num_labels=5), batch=_recognised
    ),
    Family(
        name="PatchTST",
        build=of_config(
            "PatchTSTForPrediction", num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16,
            num_hidden_layers=2, num_attention_heads=4, ffn_dim=24, prediction_length=4, loss="mse", norm_type="layernorm",
        ),
        batch=_series,
    ),
    Family(
        name="TimeSeriesTransformer",
        build=of_config(
            "TimeSeriesTransformerForPrediction", prediction_length=4, context_length=8, num_time_features=1, d_model=16,
            lags_sequence=[1, 2, 7], encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16,
        ),
        batch=_probable,
        impossible=NO_GRAPH,
        count="samples",
    ),
)  # fmt: skip
