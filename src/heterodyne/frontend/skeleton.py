"""A copy of a model that has its structure and none of its weights.

The trace runs on the copy: the user's model keeps its parameters, buffers, flags and whatever forward stores in it,
and a model that is on the meta device, on a CPU or on an accelerator gives the same graph.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from heterodyne.errors import CaptureError
from heterodyne.model_copy import copied

__all__ = ["require_initialised", "skeleton"]

_OF_TORCH = frozenset(vars(nn.Module()))
Module = TypeVar("Module", bound=nn.Module)


def skeleton(model: Module, mode: FakeTensorMode, computed: list[Tensor]) -> Module:
    """Return a deep copy whose parameters and buffers are fake CPU tensors of ``mode``; tied ones stay tied.

    Args:
        computed: gets the stand-ins of tensors that were computed from others and are kept somewhere in the model.

    Raises CaptureError for a model that holds something that cannot be copied.
    """
    stand_ins: dict[int, object] = {}
    for tensor in _tensors(model):
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = _fake(tensor, mode)

    def of_history(tensor: Tensor) -> Tensor:
        computed.append(_fake(tensor, mode))
        return computed[-1]

    try:
        return copied(model, stand_ins, of_history)
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        held = next(iter(_uncopied(model)), "something")
        raise CaptureError(
            f"{type(model).__name__} holds {held} that cannot be copied ({error}), and it is traced on a copy, so that it stays as it is. "
            "Keep what belongs to this process alone (open files, locks, generators, process groups, views of other objects) in a "
            "variable of its module, and not in an attribute of the model."
        ) from error


def _uncopied(model: nn.Module) -> Iterator[str]:
    """Yield what the model has as attributes that cannot be copied: ``'blocks.0.cache' (a generator)``."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OF_TORCH and not isinstance(value, Tensor | nn.Module):
                try:
                    copy.deepcopy(value)
                except Exception:  # noqa: BLE001  # whatever an object of the user's raises when it is copied
                    yield f"{f'{path}.{key}' if path else key!r} (a {type(value).__name__})"


def require_initialised(model: nn.Module) -> None:
    """Raise CaptureError for a model with lazy parameters or buffers that no forward has made, or most of whose weights are empty."""
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"{path!r} of {type(model).__name__} has no shape yet: a lazy module makes its weights in its first forward. "
                "Call the model once with a batch before it is given here, on every rank with the same seed; a factory does it"
            )
    empty = [path for path, parameter in model.named_parameters() if not parameter.numel()]
    if 2 * len(empty) > len(list(model.parameters())):  # one alone may be a part that a configuration leaves out
        raise CaptureError(
            f"the weights of {type(model).__name__} ({', '.join(empty[:3])}) hold nothing: a size that the model is built with is 0"
        )


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and the tensors that are plain attributes but would not run on a CPU."""
    for module in model.modules():
        yield from (p for p in module._parameters.values() if p is not None)
        yield from (b for b in module._buffers.values() if b is not None)
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.is_leaf and value.device.type != "cpu":
                yield value


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
