"""Whether tensors are as they were left: by their counters of writes, their places in memory and a few of their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["Left"]

_VALUES = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # NumPy has no bfloat16


class Left:
    """How tensors were left: their counters of writes, their places, and a few values of each, unless without ``values``."""

    def __init__(self, tensors: Mapping[str, Tensor], *, values: bool = True) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        on_host = all(tensor.device.type == "cpu" for tensor in self._tensors.values())
        self._samples: _Samples = (_OnHost if on_host else _OnDevice)() if values else _Samples()
        self._places: list[int] | None = None
        self.leave()

    @torch.no_grad()
    def leave(self) -> None:
        """Note how they are now. The host does not wait for a device."""
        self._counted = _counted(self._tensors.values())
        places = [place for _, place in self._counted]
        if places != self._places:
            self._samples.take(list(self._tensors.values()))
            self._places = places
        self._samples.leave()

    def is_counted(self) -> bool:
        """Whether any was written to as autograd counts it, or lies elsewhere."""
        return _counted(self._tensors.values()) != self._counted

    def has_other_values(self) -> Tensor | bool:
        """Whether any of the values differ, which the host does not wait for."""
        return self._samples.any_other()

    def is_other(self) -> bool:
        """Whether any has changed. The host waits for a device."""
        return self.is_counted() or bool(self.has_other_values())

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the names of those that have changed. The host waits for a device."""
        counted = _counted(self._tensors.values())
        if counted == self._counted and not self.has_other_values():
            return []
        written = [a != b for a, b in zip(counted, self._counted, strict=True)]
        others = self._samples.others() or [False] * len(written)
        return [name for name, *of in zip(self._tensors, written, others, strict=True) if any(of)]


class _Samples:
    """A few values of each tensor, for what is written through ``.data``, which nothing counts. Of this class: none."""

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Read these from here on."""

    def leave(self) -> None:
        """Note the values that there are."""

    def any_other(self) -> Tensor | bool:
        """Return whether any is another than was noted."""
        return False

    def others(self) -> list[bool]:
        """Return for each tensor whether any of its values is another."""
        return []


class _OnHost(_Samples):
    """Read as bytes, without a call of torch for each tensor."""

    def take(self, tensors: Sequence[Tensor]) -> None:
        self._views = [_some(tensor).view(_INTEGERS.get(tensor.itemsize, tensor.dtype)).numpy() for tensor in tensors]

    def leave(self) -> None:
        self._left = self._now()

    def any_other(self) -> bool:
        return self._now() != self._left

    def others(self) -> list[bool]:
        return [a != b for a, b in zip(self._now(), self._left, strict=True)]

    def _now(self) -> list[bytes]:
        return [view.tobytes() for view in self._views]


class _OnDevice(_Samples):
    """Joined by the device, which the host asks when it must know."""

    def take(self, tensors: Sequence[Tensor]) -> None:
        self._views = [_some(tensor) for tensor in tensors]

    @torch.no_grad()
    def leave(self) -> None:
        self._left = torch.cat(self._views)

    @torch.no_grad()
    def any_other(self) -> Tensor:
        return (torch.cat(self._views) != self._left).any()

    @torch.no_grad()
    def others(self) -> list[bool]:
        before = torch.split(self._left, [view.numel() for view in self._views])
        return [bool((a != b).any()) for a, b in zip(self._views, before, strict=True)]


def _counted(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


def _some(tensor: Tensor) -> Tensor:
    """A view of a few elements, spread over the memory that a tensor fills."""
    size = tensor.numel()
    apart = max(1, size // _VALUES)
    dense = tensor.detach()
    return dense.as_strided((min(_VALUES, size),), (apart,), int(dense.storage_offset()))
