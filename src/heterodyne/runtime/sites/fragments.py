"""The trained parameters in fragments, each one row of numbers: what outer steps are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

__all__ = ["Fragment", "fragments_of"]


@dataclass(frozen=True)
class Fragment:
    """Some parameters by name, with their shapes, one after the other."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def names(self) -> Sequence[str]:
        return list(self.shapes)

    @property
    def size(self) -> int:
        """Return how many numbers they have."""
        return sum(map(prod, self.shapes.values()))

    def row(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return them as one new row in fp32 on the host."""
        return torch.cat([values[name].detach().reshape(-1).to("cpu", torch.float32) for name in self.shapes])

    def values(self, row: Tensor) -> dict[str, Tensor]:
        """Return the inverse of `row`, as views."""
        parts = torch.split(row, [prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


def fragments_of(shapes: Mapping[str, tuple[int, ...]], count: int) -> tuple[Fragment, ...]:
    """Deal parameters into so many fragments: the largest first, each to the fragment that has least so far (Graham's LPT).

    A function of the shapes alone, so that sites with unlike plans find the same.
    """
    dealt: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for name in sorted(shapes, key=lambda name: (-prod(shapes[name]), name)):
        least = sizes.index(min(sizes))
        dealt[least].append(name)
        sizes[least] += prod(shapes[name])
    return tuple(Fragment({name: tuple(shapes[name]) for name in shapes if name in set(names)}) for names in dealt)
