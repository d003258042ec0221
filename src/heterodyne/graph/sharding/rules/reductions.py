"""Ops that take many elements together: sums and means, which may be taken in parts, and others, which may not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.graph.sharding.rule import LETTERS, Call, Rule
from heterodyne.graph.sharding.rules.pointwise import aligned

__all__ = ["REDUCTIONS"]


def _dims(call: Call) -> tuple[int, ...]:
    return call.dims("dim", len(call.shape(0)))


def _without(letters: str, dims: tuple[int, ...], *, keep: bool) -> str:
    """The dims that remain; with ``keep`` a reduced one remains as a dim of 1."""
    return "".join("." if dim in dims else x for dim, x in enumerate(letters) if keep or dim not in dims)


def _sum(call: Call) -> Rule:
    """Also the mean: a sum of the part over the number of all."""
    letters, dims = LETTERS[: len(call.shape(0))], _dims(call)
    result = _without(letters, dims, keep=call.argument("keepdim") is True)
    summed = "".join(letters[dim] for dim in dims)
    return Rule(operands=(letters,), outputs=(result,), summed=summed, linear=(frozenset({0}),))


def _extreme(call: Call) -> Rule:
    """Reduce each row of other dims alone. With a dim that is not named, of everything; of two tensors, place by place."""
    if len(call.specs) == 2:
        operands, result = aligned(call)
        return Rule(operands=operands, outputs=(result,))
    letters = LETTERS[: len(call.shape(0))]
    if call.argument("dim") is None:
        return Rule(operands=("." * len(letters),), outputs=tuple("." * len(spec.shape) for spec in call.op.outputs))
    dims = _dims(call)
    result = _without(letters, dims, keep=call.argument("keepdim") is True)
    operand = "".join("." if dim in dims else x for dim, x in enumerate(letters))
    return Rule(operands=(operand,), outputs=(result,) * len(call.op.outputs))


def _along(call: Call) -> Rule:
    """One dim is looked at as a whole, and the result has the shape of the operand, or another size there."""
    letters = LETTERS[: len(call.shape(0))]
    dim = call.whole_number("dim", -1) % max(1, len(letters))
    own = letters[:dim] + "." + letters[dim + 1 :] if letters else ""
    return Rule(operands=(own,), outputs=(own,) * len(call.op.outputs))


_EXTREMES: Final = frozenset({
    "all", "amax", "amin", "any", "argmax", "argmin", "kthvalue", "linalg_vector_norm", "logsumexp", "max", "median", "min", "norm", "prod",
    "std", "var",
})  # fmt: skip
_RUNNING: Final = frozenset({
    "argsort", "cummax", "cummin", "cumprod", "cumsum", "glu", "logcumsumexp", "sort", "topk", "_log_softmax", "_softmax",
})  # fmt: skip

REDUCTIONS: Final[Mapping[str, Callable[[Call], Rule | None]]] = {
    "sum": _sum,
    "mean": _sum,
    **dict.fromkeys(_EXTREMES, _extreme),
    **dict.fromkeys(_RUNNING, _along),
}
