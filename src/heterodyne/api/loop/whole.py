"""The user's model in one piece, to be measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from heterodyne.api.compiled import uncompiled
from heterodyne.errors import CaptureError
from heterodyne.frontend import CapturedModel, loss_of, require_initialised, require_own_memory
from heterodyne.measure.whole_model import WholeModel, resident_bytes, without_weights
from heterodyne.model_copy import copied

__all__ = ["copies_of", "whole_model"]


def copies_of(model: nn.Module) -> Callable[[torch.device], nn.Module]:
    """Copies of the model, so that measuring leaves the user's own as it is; ones without weights where it has none.

    Raises CaptureError for a model that cannot be copied, whose weights no forward has made yet, or lie in the memory of others.
    """
    require_initialised(model)
    require_own_memory(model)
    _require_copies(model)

    def build(device: torch.device) -> nn.Module:
        twin = copied(model)
        meta = any(p.is_meta for p in twin.parameters())
        return twin.to_empty(device=device) if meta else twin.to(device)

    return build


def _require_copies(model: nn.Module) -> None:
    try:
        without_weights(model)
    except Exception as error:  # a module may hold anything
        said = str(error).strip().partition("\n")[0]
        raise CaptureError(
            f"{type(model).__name__} cannot be copied, and it is checked and measured on copies: {said}. Keep open files, locks and "
            "process groups out of its attributes"
        ) from error


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
        resident_bytes=resident_bytes(model),
    )
