"""How many bytes a forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heterodyne.eager import run_eager

__all__ = ["bytes_kept"]


def bytes_kept(forward: Callable[[], object], weights: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Bytes of the distinct storages that ``forward`` saves for its backward, without those of the weights; and of those, apart, that are
    narrow copies of weights, which autocast makes: each forward makes its own, but they do not grow with the batch.
    """
    weights = list(weights)
    copies, own = _Copies(weights), {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, torch.UntypedStorage] = {}  # holds the storages, so that no address comes to mean two of them

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage)
        return tensor.detach()  # an output that its own op keeps, with its graph, would hold itself for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), copies, run_eager():
        forward()
    copied = sum(storage.nbytes() for place, storage in kept.items() if place in copies.storages and place not in own)
    return sum(storage.nbytes() for place, storage in kept.items() if place not in copies.storages), copied


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the weights through changes of dtype."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {w.untyped_storage().data_ptr(): w.untyped_storage() for w in weights}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self.storages:
            copy = result.untyped_storage()
            self.storages[copy.data_ptr()] = copy
        return result
