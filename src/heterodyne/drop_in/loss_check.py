"""Whether the loss counts what it is said to count, asked of the model itself, once.

Where forward returns the loss, it is computed for this rank's samples, and for two parts of them, in eval mode, so that nothing is drawn.
With the count right, the weighted losses of the parts are that of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.drop_in.loss_weight import Count, samples_in
from heterodyne.errors import VerifyError
from heterodyne.runtime.exact.verify import rounding_bar

__all__ = ["evaluated", "loss_in", "require_count"]


def loss_in(output: Any) -> Tensor | None:
    """The loss, if it is all that there is, or in the place where Transformers has it; else None."""
    if isinstance(output, tuple | list) and output and not hasattr(output, "loss"):
        output = output[0]  # the loss comes first, as in Transformers
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    return found if isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point() else None


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """Let a module compute without gradients and in eval mode, and put back the mode of each part."""
    modes = {part: part.training for part in module.modules()}
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training


def require_count(
    module: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    count: Count,
    *,
    words: str,
    sums: bool,
    forward: Callable[..., Any] | None = None,
) -> bool:
    """Compare the loss of a batch with that of its parts, as ``forward`` gives it; None: as ``module`` does.

    False if there is none in eval mode, if it is another one each time, or if there is one sample.

    Raises VerifyError with both losses.
    """
    samples = samples_in((*inputs, *keywords.values()))
    if samples is None or samples < 2:
        return False
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    casts: set[bool] = set()  # autocast may begin inside of forward
    hooks = [
        part.register_forward_pre_hook(lambda *_: casts.add(torch.is_autocast_enabled(device.type)))
        for part in module.modules()
    ]
    parts = [(0, samples), (0, 1), (1, samples), (0, samples)]
    losses, counts = [], []
    try:
        with evaluated(module):
            for first, stop in parts:
                own, named = (_part(each, samples, first, stop) for each in (inputs, dict(keywords)))
                loss = loss_in((forward or module)(*own, **named))
                if loss is None:
                    return False
                losses.append(float(loss))
                counts.append(1.0 if sums else count(own, named))
    finally:
        for hook in hooks:
            hook.remove()
    if not all(counts) or not all(map(math.isfinite, losses)):
        return True
    if losses[0] != losses[3]:
        return False
    weighted = sum(counts[part] * losses[part] for part in (1, 2)) / counts[0]
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    low = True in casts or dtype not in (torch.float32, torch.float64)
    if abs(weighted - losses[0]) > rounding_bar(device, "bf16" if low else "fp32") * max(abs(losses[0]), 1e-3):
        raise VerifyError(
            f"the loss of this rank's {samples} samples is {losses[0]:.6g}, and {weighted:.6g} from two parts of them by {words}, so "
            "it divides by something else. Say by what: loss_count='tokens' (entries of 'labels' that are not -100), 'shifted tokens' "
            "(the model shifts its labels by one, as causal ones of Transformers do), 'sum', or a function of the arguments of forward. If "
            "it compares samples with each other, compute it behind forward from the rows of all ranks, model.all_gather(rows), or use "
            "hd.distribute; loss_count='samples' averages the losses of the ranks by their samples"
        )
    return True


def _part(value: Any, samples: int, first: int, stop: int) -> Any:
    """The samples [first, stop) of whatever has ``samples`` of them."""
    if isinstance(value, Tensor):
        return value[first:stop] if value.dim() and len(value) == samples else value
    if isinstance(value, Mapping):
        return {name: _part(each, samples, first, stop) for name, each in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_part(each, samples, first, stop) for each in value)
    return value
