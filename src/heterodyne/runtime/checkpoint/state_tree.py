"""A nested state (dicts, lists, tuples, tensors, plain values) as named tensors and the skeleton that held them.

Checkpoints store tensors by name; what optimizers keep beside them (parameter groups, step counts, ``None``) stays in
the skeleton, with a `Leaf` in place of each tensor. Where each rank has a part of a state, the whole has all their parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Leaf", "graft", "merged", "strip"]


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


def merged(skeletons: Sequence[Any]) -> Any:
    """The skeleton of the state that these are parts of: dicts have the keys of all, everything else is that of the first part
    that has it. None is no part.
    """
    parts = [skeleton for skeleton in skeletons if skeleton is not None]
    if len(parts) < 2 or not all(isinstance(part, dict) for part in parts):
        return parts[0] if parts else None
    keys = dict.fromkeys(key for part in parts for key in part)
    return {key: merged([part[key] for part in parts if key in part]) for key in keys}


def graft(skeleton: Any, tensors: dict[str, Tensor], *, partly: bool = False) -> Any:
    """The inverse of `strip`; tensors that the skeleton has no place for are left out.

    A tensor that is missing is a KeyError, or with ``partly``, what it would be in a dict is left out, and the dict if nothing is
    left of it.
    """
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.name]
    if isinstance(skeleton, dict):
        kept = {k: item for k, item in skeleton.items() if not partly or _is_there(item, tensors)}
        return {key: graft(item, tensors, partly=partly) for key, item in kept.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(graft(item, tensors, partly=partly) for item in skeleton)
    return skeleton


def _is_there(skeleton: Any, tensors: dict[str, Tensor]) -> bool:
    """Whether it has no tensors, or some that are there."""
    leaves = list(_leaves(skeleton))
    return not leaves or any(leaf.name in tensors for leaf in leaves)


def _leaves(skeleton: Any) -> Iterator[Leaf]:
    if isinstance(skeleton, Leaf):
        yield skeleton
    elif isinstance(skeleton, dict | list | tuple):
        for item in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from _leaves(item)
