"""Image models of Transformers."""

from __future__ import annotations

from typing import Any

import torch

from unseen.family import MIXES, Batch, Family, classes, image, of_config

__all__ = ["FAMILIES"]

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}


def _classified(samples: int) -> Batch:
    return {"pixel_values": image(samples), "labels": classes(samples)}


def _larger(samples: int) -> Batch:
    return {"pixel_values": image(samples, 32), "labels": classes(samples)}


def _segmented(samples: int) -> Batch:
    labels = torch.randint(0, 5, (samples, 32, 32))
    labels[torch.rand(samples, 32, 32) < 0.4] = 255
    labels[1, :20] = 255
    return {"pixel_values": image(samples, 32), "labels": labels}


def _reconstructed(samples: int) -> Batch:
    return {"pixel_values": image(samples), "noise": torch.rand(samples, 4)}


FAMILIES = (
    Family(name="ViT", build=of_config("ViTForImageClassification", **TINY, num_labels=5), batch=_classified),
    Family(name="DeiT", build=of_config("DeiTForImageClassification", **TINY, num_labels=5), batch=_classified),
    Family(name="BEiT", build=of_config("BeitForImageClassification", **TINY, num_labels=5), batch=_classified),
    Family(
        name="Swin",
        build=of_config(
            "SwinForImageClassification", image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 4],
            window_size=4, num_labels=5,
        ),
        batch=_classified,
    ),
    Family(
        name="ConvNeXt",
        build=of_config("ConvNextForImageClassification", hidden_sizes=[8, 12], depths=[1, 1], num_stages=2, num_labels=5),
        batch=_classified,
    ),
    Family(
        name="ResNet",
        build=of_config(
            "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic",
            num_labels=5,
        ),
        batch=_classified,
        impossible=MIXES,
    ),
    Family(
        name="RegNet",
        build=of_config(
            "RegNetForImageClassification", embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], groups_width=4, num_labels=5
        ),
        batch=_larger,
        impossible=MIXES,
    ),
    Family(
        name="ViTMAE",
        build=of_config(
            "ViTMAEForPreTraining", **TINY, decoder_hidden_size=8, decoder_num_hidden_layers=1, decoder_num_attention_heads=2,
            decoder_intermediate_size=12, mask_ratio=0.5,
        ),
        batch=_reconstructed,
    ),
    Family(
        name="Segformer",
        build=of_config(
            "SegformerForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 12],
            patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=8,
            num_labels=5, semantic_loss_ignore_index=255,
        ),
        batch=_segmented,
        impossible=MIXES,
    ),
    Family(
        name="DINOv2",
        build=of_config("Dinov2ForImageClassification", **{**TINY, "mlp_ratio": 2}, num_labels=5),
        batch=_classified,
    ),
)  # fmt: skip
