"""Products of matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.graph.sharding.rule import LETTERS, Call, Rule
from heterodyne.graph.size import Size

__all__ = ["PRODUCTS"]

_ONE: Final = Size.of(1)


def _linear(call: Call) -> Rule | None:
    """``...k,ok->...o`` (+ ``o``): columns o, rows k."""
    if len(call.shape(1)) != 2:
        return None  # one row
    before = LETTERS[: len(call.output) - 1]
    bias = ("o",) if len(call.specs) == 3 else ()
    first = (frozenset({0}),) if not bias else (frozenset({0, 2}),)
    return Rule(
        operands=(f"{before}k", "ok", *bias), outputs=(f"{before}o",), summed="k", added=frozenset({2}), linear=first
    )


def _matmul(call: Call) -> Rule | None:
    """``...ik,...kj->...ij``, with broadcast samples, and vectors on either side."""
    left, right = (len(call.shape(place)) for place in (0, 1))
    if left == 0 or right == 0 or len(call.op.outputs[0].shape) > 20:
        return None
    rows, columns = "I" if left > 1 else "", "J" if right > 1 else ""
    out = call.output
    batch = LETTERS[: len(out) - len(rows) - len(columns)]

    def samples(shape: tuple[Size, ...]) -> str:
        own = batch[len(batch) - len(shape) :] if shape else ""
        of_output = out[len(batch) - len(shape) : len(batch)]
        return "".join(
            "." if size == _ONE != result else letter
            for letter, size, result in zip(own, shape, of_output, strict=True)
        )

    first = f"{samples(call.shape(0)[: max(0, left - 2)])}{rows}K"
    second = f"{samples(call.shape(1)[: max(0, right - 2)])}K{columns}"
    return Rule(
        operands=(first, second),
        outputs=(f"{batch}{rows}{columns}",),
        summed="K",
        linear=(frozenset({0}), frozenset({1})),
    )


def _addmm(call: Call) -> Rule:
    """``ik,kj->ij``, and a bias of any shape that is broadcast to it."""
    bias = _bias(call, "IJ")
    return Rule(operands=(bias, "IK", "KJ"), outputs=("IJ",), summed="K", added=frozenset({0}))


def _baddbmm(call: Call) -> Rule:
    return Rule(operands=(_bias(call, "aIJ"), "aIK", "aKJ"), outputs=("aIJ",), summed="K", added=frozenset({0}))


def _bias(call: Call, result: str) -> str:
    shape = call.shape(0)
    own, of_output = result[len(result) - len(shape) :], call.output[len(result) - len(shape) :]
    return "".join("." if s == _ONE != out else x for x, s, out in zip(own, shape, of_output, strict=True))


def _outer(call: Call) -> Rule:
    del call
    return Rule(operands=("i", "j"), outputs=("ij",), linear=(frozenset({0}), frozenset({1})))


def _einsum(call: Call) -> Rule | None:
    """As its equation says. None for one with dots, or with a letter twice in one operand."""
    equation = call.argument("equation")
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    inputs, result = equation.replace(" ", "").split("->")
    operands = tuple(inputs.split(","))
    if any(len(set(dims)) < len(dims) for dims in (*operands, result)):
        return None
    summed = "".join(sorted(set("".join(operands)) - set(result)))
    linear = tuple(frozenset({place}) for place in range(len(operands)))
    return Rule(operands=operands, outputs=(result,), summed=summed, linear=linear)


def _dot(call: Call) -> Rule:
    del call
    return Rule(operands=("k", "k"), outputs=("",), summed="k")


PRODUCTS: Final[Mapping[str, Callable[[Call], Rule | None]]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "mv": _matmul,
    "dot": _dot,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "outer": _outer,
    "einsum": _einsum,
}
