"""Values that forward and loss have read, each as it was: compared by identity, by version, or by its few elements."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from numbers import Number
from types import MethodType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "ClassOf",
    "Itself",
    "SameArray",
    "SameDefaultType",
    "SameFunction",
    "SameTensor",
    "SameValue",
    "SameVariable",
    "are_equal",
]

SMALL = 64
"""Elements that are compared of a tensor or an array: all, or so many of more."""
_MOST_BYTES = 2**18  # of an array that is compared whole
_WITH_NUMPY = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
)


class SameValue(Protocol):
    """What no identity and no version tells, so that its values are compared at each step."""

    def is_still(self) -> bool:
        """Return whether it is as it was."""


class SameTensor:
    """A tensor as it was: the same object and, by its version counter, not written to. Of one on the host some elements are compared by
    value too, all of a small one, since nothing counts writes through ``.data``."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        self._place = _place_of(tensor)
        on_host = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized
        few = on_host and tensor.numel() <= SMALL
        self.values = tensor.detach().clone() if few else None
        self._some = SameArray(_as_array(tensor)) if on_host and not few and tensor.dtype in _WITH_NUMPY else None

    def is_still(self) -> bool:
        if _place_of(self.tensor) != self._place:  # another storage was put in by ``tensor.data = ...``
            return False
        if self.values is not None:
            return _have_equal_values(self.values, self.tensor.detach())
        return self._some is None or self._some.is_still()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameTensor):
            return False
        if self.values is not None and other.values is not None:
            return self.values.dtype is other.values.dtype and _have_equal_values(self.values, other.values)
        return other.tensor is self.tensor and other.version == self.version and other._some == self._some

    __hash__ = None  # type: ignore[assignment]  # it is compared alone

    def __repr__(self) -> str:
        if self.values is not None:
            return str(self.values.tolist())
        return f"a tensor of {list(self.tensor.shape)} (written {self.version} times)"


class SameArray:
    """An array as it was, by all of its elements, or by some of many."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array if array.nbytes <= _MOST_BYTES else array.reshape(-1)[:: array.size // SMALL]
        self._bytes = self._array.tobytes()
        self._described = (array.shape, str(array.dtype))

    def is_still(self) -> bool:
        return self._array.tobytes() == self._bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameArray) and other._bytes == self._bytes and other._described == self._described

    __hash__ = None  # type: ignore[assignment]  # it is compared alone

    def __repr__(self) -> str:
        if self._array.size > SMALL or self._array.shape != self._described[0]:
            return f"an array of {list(self._described[0])} ({hashlib.blake2b(self._bytes, digest_size=4).hexdigest()})"
        return str(np.frombuffer(self._bytes, self._described[1]).reshape(self._described[0]).tolist())


@dataclass(frozen=True, eq=False)
class SameFunction:
    """A function, compared by identity, and methods by what they are bound to."""

    function: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameFunction):
            return False
        return self.function is other.function or (
            isinstance(self.function, MethodType) and bool(self.function == other.function)
        )

    __hash__ = None  # type: ignore[assignment]  # it is compared alone

    def __repr__(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))


@dataclass(frozen=True)
class ClassOf:
    """The class of a module."""

    kind: type

    def __repr__(self) -> str:
        return self.kind.__name__


@dataclass(frozen=True, eq=False)
class Itself:
    """An object of which only identity is known."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]  # it is compared alone

    def __repr__(self) -> str:
        return f"an object of {type(self.value).__name__}"


class SameVariable:
    """A variable of the environment as it was."""

    def __init__(self, name: str) -> None:
        self.name, self.value = name, os.environ.get(name)

    def is_still(self) -> bool:
        return os.environ.get(self.name) == self.value


class SameDefaultType:
    """The type of tensors that are made without one, as it was."""

    def __init__(self) -> None:
        self.value = torch.get_default_dtype()

    def is_still(self) -> bool:
        return torch.get_default_dtype() is self.value


def are_equal(before: object, after: object) -> bool:
    if type(before) is not type(after):  # True is 1
        return False
    if isinstance(before, Number | range | slice | tuple):  # NaN is no number but itself, and 0.0 is -0.0
        return before is after or repr(before) == repr(after)
    return before is after or before == after


def _place_of(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else 0


def _have_equal_values(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = tensor.detach().numpy()
    return found
