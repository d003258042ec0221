"""Optimizer state whose tensors wrap other tensors, such as the codes and scales of a state in 8 bits.

Exchanges and checkpoints carry the tensors inside, each under a name of its own (``exp_avg.codes``): they are plain, and nothing of the
class has to be written down, since the optimizer makes its wrappers anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from heterodyne.errors import CheckpointError

__all__ = ["has_wrapped", "unwrapped", "wrapped"]

_JOINED = "."


def unwrapped(values: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter with the tensors inside of each wrapper in its place. Nothing is copied."""
    return {f"{key}{path}": tensor for key, value in values.items() for path, tensor in _inside(value).items()}


def has_wrapped(values: Mapping[str, Any]) -> bool:
    """Whether this is what `unwrapped` gives of a state with wrappers."""
    return any(_JOINED in key for key in values)


def wrapped(name: str, values: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `unwrapped`, in the tensors that the optimizer has ``made`` for the parameter of that name.

    Raises CheckpointError where it makes other ones.
    """
    there = unwrapped(made)
    shapes = {key: _shape(value) for key, value in values.items()}
    wanted = {key: _shape(value) for key, value in there.items()}
    if shapes != wanted:
        raise CheckpointError(f"the optimizer's state of {name} is {shapes}, and this optimizer's is {wanted}")
    for key, value in values.items():
        if isinstance(value, Tensor):
            there[key].copy_(value)
    return {key: values.get(key, value) if not isinstance(value, Tensor) else value for key, value in made.items()}


def _inside(value: Any) -> dict[str, Any]:
    if not is_traceable_wrapper_subclass(value):
        return {"": value}
    names, _ = value.__tensor_flatten__()
    parts = {name: _inside(getattr(value, name)) for name in names}
    return {f"{_JOINED}{name}{path}": tensor for name, own in parts.items() for path, tensor in own.items()}


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
