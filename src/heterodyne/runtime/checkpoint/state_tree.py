"""A nested state (dicts, lists, tuples, tensors, plain values) as named tensors and the skeleton that held them.

Checkpoints store tensors by name; what optimizers keep beside them (parameter groups, step counts, ``None``) stays in
the skeleton, with a `Leaf` in place of each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Leaf", "graft", "strip"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Where the tensor of that name was."""

    name: str


def strip(state: Any, root: str) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a state, named by their path from ``root``, and the skeleton. Raises ValueError for two of one name."""
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            if path in tensors:
                raise ValueError(f"two tensors of a state are called {path!r}")
            tensors[path] = value.detach()
            return Leaf(path)
        if isinstance(value, dict):
            return {key: visit(item, f"{path}/{key}") for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(visit(item, f"{path}/{index}") for index, item in enumerate(value))
        return value

    return tensors, visit(state, root)


def graft(skeleton: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `strip`; tensors that the skeleton has no place for are left out. Raises KeyError for one that is missing."""
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.name]
    if isinstance(skeleton, dict):
        return {key: graft(item, tensors) for key, item in skeleton.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(graft(item, tensors) for item in skeleton)
    return skeleton
