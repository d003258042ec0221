"""A nested state (dicts, lists, tuples, tensors, plain values) as named tensors and the skeleton that held them.

Checkpoints store tensors by name; what optimizers keep beside them (parameter groups, step counts, ``None``) stays in
the skeleton, with a `Leaf` in place of each tensor. Where each rank has a part of a state, the whole has all their parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Leaf", "graft", "keys_of", "merged", "strip"]


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


def keys_of(name: str) -> list[str]:
    """The keys that lead to a tensor from the root, of which `strip` made its name; a key may have been cut where it has a ``/``."""
    return name.split("/")[1:]


def graft(skeleton: Any, tensors: dict[str, Tensor], *, without: Collection[str] = ()) -> Any:
    """The inverse of `strip`; tensors that the skeleton has no place for are left out.

    ``without``: names of tensors that are not asked for; in dicts, what has no other tensors is left out with them. Raises KeyError
    for any other that is missing.
    """
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.name]
    if isinstance(skeleton, dict):
        kept = {key: item for key, item in skeleton.items() if not without or not _is_without(item, without)}
        return {key: graft(item, tensors, without=without) for key, item in kept.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(graft(item, tensors, without=without) for item in skeleton)
    return skeleton


def _is_without(skeleton: Any, without: Collection[str]) -> bool:
    leaves = list(_leaves(skeleton))
    return bool(leaves) and all(leaf.name in without for leaf in leaves)


def _leaves(skeleton: Any) -> Iterator[Leaf]:
    if isinstance(skeleton, Leaf):
        yield skeleton
    elif isinstance(skeleton, dict | list | tuple):
        for item in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from _leaves(item)
