"""The user's model in one piece, to be measured."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from heterodyne.frontend import Captured, loss_of
from heterodyne.measure.whole_model import WholeModel, without_weights

__all__ = ["whole_model"]


def whole_model(model: nn.Module, captured: Captured, example_batch: Mapping[str, Tensor]) -> WholeModel:
    """Copies of the model, so that measuring leaves the user's own as it is; ones without weights where it has none."""

    def build(device: torch.device) -> nn.Module:
        twin = copy.deepcopy(model)
        meta = any(p.is_meta for p in twin.parameters())
        return twin.to_empty(device=device) if meta else twin.to(device)

    return WholeModel(
        build=build,
        inputs=captured.graph.inputs,
        example=example_batch,
        loss=loss_of,
        build_empty=lambda: without_weights(model),
        weightless=any(p.is_meta for p in model.parameters()),
    )
