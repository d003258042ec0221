"""The loss, out of whatever a model returns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from heterodyne.errors import CaptureError

__all__ = ["DIVISOR", "LOSS", "NUMBER", "SAMPLES", "loss_of"]

LOSS = "loss"
"""Under which name a model, or a stage of one, hands out its loss."""

SAMPLES = "loss.samples"
"""The name under which the last stage is given the number of samples of the global batch, where its loss needs it."""

DIVISOR = "loss.divisor."
"""The same for what the terms of the loss are divided by: this and their number."""


NUMBER = "number."
"""The same for numbers of the model that change during the run: this and their place."""


def loss_of(output: object) -> Tensor:
    """The scalar loss of a model's output.

    A model called with a batch returns its loss, or an object or mapping that holds it as ``loss``, or a tuple or list that
    starts with it. Raises CaptureError if there is none or if it is not one floating point number.
    """
    if isinstance(output, Tensor):
        loss: object = output
    elif isinstance(output, Mapping):
        loss = output.get(LOSS)
    elif hasattr(output, "loss"):
        loss = output.loss
    elif isinstance(output, tuple | list) and output:
        loss = output[0]
    else:
        loss = None
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"the model returned {_describe(output)}, which holds no loss. Let forward return the loss as a scalar tensor, "
            "an object with .loss, or a tuple that starts with the loss, or pass the function that computes it: "
            "hd.distribute(model, batch, loss=...). A Hugging Face model returns one when the batch has labels."
        )
    if loss.dim() != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"the loss is a tensor of shape {[str(s) for s in loss.shape]} and dtype {loss.dtype}, not one floating point number. "
            "Reduce it inside forward with .mean() or .sum(), or return the loss before the other outputs. If it is no loss, pass the "
            "function that computes one of it: hd.distribute(model, batch, loss=...)."
        )
    return loss


def _describe(output: object) -> str:
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with the keys {', '.join(map(str, output)) or 'none'}"
    return "None" if output is None else f"a {type(output).__name__}"
