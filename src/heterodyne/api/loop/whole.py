"""The user's model in one piece, to be measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from heterodyne.api.compiled import uncompiled
from heterodyne.frontend import CapturedModel, loss_of
from heterodyne.measure.whole_model import WholeModel, without_weights

__all__ = ["copies_of", "whole_model"]


def copies_of(model: nn.Module) -> Callable[[torch.device], nn.Module]:
    """Copies of the model, so that measuring leaves the user's own as it is; ones without weights where it has none."""

    def build(device: torch.device) -> nn.Module:
        twin = copy.deepcopy(model)
        meta = any(p.is_meta for p in twin.parameters())
        return twin.to_empty(device=device) if meta else twin.to(device)

    return build


def whole_model(model: nn.Module, captured: CapturedModel, example_batch: Mapping[str, Tensor]) -> WholeModel:
    """Made of `copies_of` the model, compiled ones where the compiled code will run."""
    # What is replaced for dropout and BatchNorm is replaced in Python code, so that is what runs then.
    replaces = captured.graph.random or captured.graph.batch_statistics
    model = uncompiled(model) if replaces else model
    return WholeModel(
        build=copies_of(model),
        inputs=captured.graph.inputs,
        example=example_batch,
        loss=loss_of,
        build_empty=lambda: without_weights(model),
        weightless=any(p.is_meta for p in model.parameters()),
    )
