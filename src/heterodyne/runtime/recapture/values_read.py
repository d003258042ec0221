"""Values that forward and loss have read, each as it was: compared by identity, by version, or by its few elements."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import numpy as np
from torch import Tensor

__all__ = ["Callable", "ClassOf", "Compared", "SameArray", "SameTensor", "SameVariable", "are_equal"]

SMALL = 64
"""Elements of the tensors and arrays whose values are compared."""


class Compared(Protocol):
    """What no identity and no version tells, so that its values are compared at each step."""

    def is_still(self) -> bool:
        """Whether it is as it was."""


class SameTensor:
    """A tensor as it was: the same object and, by its version counter, not written to; one of few elements is compared by value too,
    since nothing counts writes through ``.data``."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        few = tensor.device.type == "cpu" and tensor.numel() <= SMALL
        self.values = tensor.detach().clone() if few else None

    def is_still(self) -> bool:
        return self.values is None or _have_equal_values(self.values, self.tensor.detach())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameTensor):
            return False
        if self.values is not None and other.values is not None:
            return self.values.dtype is other.values.dtype and _have_equal_values(self.values, other.values)
        return other.tensor is self.tensor and other.version == self.version

    __hash__ = None  # type: ignore[assignment]  # it is compared alone

    def __repr__(self) -> str:
        if self.values is not None:
            return str(self.values.tolist())
        return f"a tensor of {list(self.tensor.shape)} (written {self.version} times)"


class SameArray:
    """An array of few elements as it was."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array, self._bytes = array, array.tobytes()
        self._described = (array.shape, str(array.dtype))

    def is_still(self) -> bool:
        return self._array.tobytes() == self._bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameArray) and other._bytes == self._bytes and other._described == self._described

    __hash__ = None  # type: ignore[assignment]  # it is compared alone

    def __repr__(self) -> str:
        return str(np.frombuffer(self._bytes, self._described[1]).reshape(self._described[0]).tolist())


@dataclass(frozen=True, eq=False)
class Callable:
    """A function, compared by identity, and methods by what they are bound to."""

    function: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Callable):
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


class SameVariable:
    """A variable of the environment as it was."""

    def __init__(self, name: str) -> None:
        self.name, self.value = name, os.environ.get(name)

    def is_still(self) -> bool:
        return os.environ.get(self.name) == self.value


def are_equal(before: object, after: object) -> bool:
    # True is 1, and NaN is no number but itself.
    return type(before) is type(after) and (before is after or before == after)


def _have_equal_values(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
