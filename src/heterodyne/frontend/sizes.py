"""From the symbolic sizes of a traced graph to polynomials in the batch."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.utils._sympy.functions import ToFloat

from heterodyne.errors import CaptureError
from heterodyne.graph import Size, TensorSpec

__all__ = ["degree", "fit", "proportional", "size_of", "spec_of"]


def size_of(value: float | torch.SymInt | torch.SymFloat) -> Size:
    """A number or a symbolic number as a polynomial in the batch.

    Raises CaptureError if it is none: if it depends on the data, or divides the batch (which couples samples with each other).
    """
    if isinstance(value, int | float):
        return Size.of(value)
    return _polynomial(value.node.expr.replace(ToFloat, lambda number: number))


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape and dtype of a traced tensor."""
    return TensorSpec(shape=tuple(size_of(s) for s in tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def degree(tensor: Tensor) -> int:
    """With which power of the batch the number of its elements grows."""
    return sum(max(0, len(size_of(size).coefficients) - 1) for size in tensor.shape)


def proportional(size: Size) -> bool:
    """Return whether it is the batch times a number."""
    return len(size.coefficients) == 2 and size.coefficients[0] == 0


def fit(values: dict[int, int]) -> Size:
    """The polynomial through values at some batch sizes: ``{2: 20, 3: 30}`` gives 10 b. Exact: it is done in fractions."""
    result = [Fraction(0)] * len(values)
    for at, value in values.items():
        basis = [Fraction(value)]
        for other in values:
            if other != at:
                # one more factor of Lagrange's basis: the old one times b - other, over at - other
                scaled = [c / (at - other) for c in basis]
                basis = [-other * c for c in scaled] + [Fraction(0)]
                for power, c in enumerate(scaled, start=1):
                    basis[power] += c
        result = [a + b for a, b in zip(result, basis, strict=True)]
    return Size(tuple(int(c) if c.denominator == 1 else float(c) for c in result))


@lru_cache(maxsize=4096)
def _polynomial(expression: sympy.Expr) -> Size:
    symbols = expression.free_symbols
    if not symbols:
        return Size.of(int(expression))
    if len(symbols) > 1 or any(str(symbol).startswith("u") for symbol in symbols):
        raise CaptureError(
            f"a size depends on the data ({expression}). "
            "Keep sizes fixed: use torch.where or a mask in place of selecting by a condition."
        )
    (symbol,) = symbols
    if not expression.is_polynomial(symbol):
        raise CaptureError(
            f"the batch is cut into parts (a size is {expression}), which couples its samples; "
            "on several devices each has samples of its own. Pass what belongs together as one sample, in a further dimension."
        )
    return Size(tuple(int(c) for c in reversed(sympy.Poly(expression, symbol).all_coeffs())))
