"""What tells whether ranks read the same samples: equal for equal ones, whatever they are made of, and only for those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from heterodyne.drop_in.streams import _digest


@dataclass
class Sample:
    image: torch.Tensor
    words: list[str]


class Image:
    """As PIL's, which numpy reads."""

    def __init__(self, value: int) -> None:
        self._array = np.full((2, 2), value, dtype=np.uint8)

    @property
    def __array_interface__(self) -> Any:
        return self._array.__array_interface__


MADE: dict[str, Any] = {
    "tensor": lambda n: torch.full((3,), float(n), dtype=torch.bfloat16),
    "strided": lambda n: torch.full((4, 4), n)[:, ::2],
    "array": lambda n: np.full(3, n),
    "nested": lambda n: {"x": [torch.tensor(n), "word"], "y": (None, 1.5)},
    "words": lambda n: f"word {n}",
    "dataclass": lambda n: Sample(torch.full((2,), n), ["a"]),
    "image": Image,
}


@pytest.mark.parametrize("name", MADE)
def test_equal_samples_have_one_digest_and_others_another(name: str) -> None:
    first, again, other = MADE[name](1), MADE[name](1), MADE[name](2)
    assert _digest(first) == _digest(again)
    assert _digest(first) != _digest(other)
