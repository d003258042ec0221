"""The loss of a Trainer that stands outside of the model: that of the script, or label smoothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from torch import Tensor
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["ITEMS", "loss_outside"]

ITEMS: Final = "num_items_in_batch"


def loss_outside(trainer: Trainer) -> Callable[..., Tensor] | None:
    """Return the loss as a function of outputs and batch; None if the model has it."""
    chosen, smoother = trainer.compute_loss_func, trainer.label_smoother
    if chosen is not None:

        def loss_function(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
            return cast(Tensor, chosen(output, batch.get("labels"), num_items_in_batch=batch.get(ITEMS)))

        return loss_function
    if smoother is None:
        return None
    shift = type(trainer.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    counts = ITEMS in inspect.signature(smoother).parameters  # the first versions 5 do not pass it on

    def smoothed(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        items = {ITEMS: batch.get(ITEMS)} if counts else {}
        return cast(Tensor, smoother(output, batch["labels"], shift_labels=shift, **items))

    return smoothed
