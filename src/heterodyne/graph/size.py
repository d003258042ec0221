"""Sizes that depend on the batch: polynomials in the number of samples.

A captured graph has a dynamic batch, so every shape, byte count and FLOP count is a function of the micro-batch size b.
For all models but those that compare samples with each other it is c0 + c1 b; contrastive losses reach b^2. Keeping
the coefficients (rather than the value at one b) lets the planner weigh any batch share without capturing again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ZERO", "Size"]


@dataclass(frozen=True, slots=True)
class Size:
    """c0 + c1 b + c2 b^2 + ..., with no trailing zeros.

    >>> (Size.of(3) + Size.per_sample(2))(10)
    23
    """

    coefficients: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        kept = tuple(self.coefficients)
        while kept and kept[-1] == 0:
            kept = kept[:-1]
        object.__setattr__(self, "coefficients", kept)

    @classmethod
    def of(cls, value: float) -> Size:
        """A size that does not depend on the batch."""
        return cls((value,))

    @classmethod
    def per_sample(cls, value: float) -> Size:
        """A size in proportion to the batch."""
        return cls((0, value))

    @classmethod
    def total(cls, sizes: Iterable[Size]) -> Size:
        """The sum of sizes; zero for none."""
        sums: list[float] = []
        for size in sizes:
            own = size.coefficients
            sums += [0] * (len(own) - len(sums))
            for power, coefficient in enumerate(own):
                sums[power] += coefficient
        return cls(tuple(sums))

    @property
    def is_constant(self) -> bool:
        return len(self.coefficients) <= 1

    def __call__(self, batch: float) -> float:
        """The value for a batch of that many samples."""
        value: float = 0
        for coefficient in reversed(self.coefficients):
            value = value * batch + coefficient
        return value

    def __add__(self, other: Size) -> Size:
        longer, shorter = sorted((self.coefficients, other.coefficients), key=len, reverse=True)
        return Size(tuple(a + b for a, b in zip(longer, shorter, strict=False)) + longer[len(shorter) :])

    def __mul__(self, other: Size | float) -> Size:
        if not isinstance(other, Size):
            return Size(tuple(c * other for c in self.coefficients))
        product = [0.0] * max(0, len(self.coefficients) + len(other.coefficients) - 1)
        for i, a in enumerate(self.coefficients):
            for j, b in enumerate(other.coefficients):
                product[i + j] += a * b
        return Size(tuple(int(c) if float(c).is_integer() else c for c in product))

    __rmul__ = __mul__


ZERO = Size()
