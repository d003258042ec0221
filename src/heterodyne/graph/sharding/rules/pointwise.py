"""Ops that treat each element by itself, with tensors of other shapes broadcast over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.graph.ir import Ref
from heterodyne.graph.op_kinds import FILLED_LIKE
from heterodyne.graph.sharding.rule import LETTERS, Call, Rule
from heterodyne.graph.size import Size

__all__ = ["POINTWISE", "aligned"]

_ONE: Final = Size.of(1)

_PLAIN: Final = frozenset({
    "abs", "acos", "addcdiv", "addcmul", "alias", "asin", "atan", "atan2", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor",
    "ceil", "celu", "clamp", "clamp_max", "clamp_min", "copy", "cos", "cosh", "deg2rad", "detach", "elu", "eq", "erf", "erfc", "erfinv",
    "exp", "exp2", "expm1", "fill", "floor", "floor_divide", "fmod", "frac", "ge", "gelu", "gt", "hardshrink", "hardsigmoid", "hardswish",
    "hardtanh", "heaviside", "isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp", "lgamma", "lift_fresh_copy", "log", "log10",
    "log1p", "log2", "log_sigmoid", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill",
    "maximum", "minimum", "mish", "nan_to_num", "ne", "pow", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu",
    "sgn", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "softshrink", "sqrt", "square", "tan", "tanh", "threshold", "trunc",
    "where", "xlogy", "__and__", "__or__", "__xor__",
})  # fmt: skip
_RANDOM: Final = frozenset({"dropout", "alpha_dropout", "rand_like", "randn_like", "bernoulli"})


def aligned(call: Call) -> tuple[tuple[str, ...], str]:
    """The letters of operands that are broadcast to the shape of the result, and of the result."""
    result = LETTERS[: len(call.output)]
    operands = []
    for spec in call.specs:
        own = result[len(result) - len(spec.shape) :]
        sizes = zip(own, spec.shape, call.output[len(result) - len(spec.shape) :], strict=True)
        operands.append("".join("." if size == _ONE != out else letter for letter, size, out in sizes))
    return tuple(operands), result


def _plain(call: Call) -> Rule | None:
    operands, result = aligned(call)
    return Rule(operands=operands, outputs=(result,) * len(call.op.outputs))


def _copied(call: Call) -> Rule:
    operands, result = aligned(call)
    return Rule(operands=operands, outputs=(result,), linear=(frozenset({0}),))


def _converted(call: Call) -> Rule:
    """To another dtype sums do not go: they would be rounded before they are taken. Of what it is made like only the dtype is read."""
    result = LETTERS[: len(call.output)]
    operands = (result, *("." * len(spec.shape) for spec in call.specs[1:]))
    same = call.specs[0].dtype == call.op.outputs[0].dtype
    return Rule(operands=operands, outputs=(result,), linear=(frozenset({0}),) if same else ())


def _added(call: Call) -> Rule:
    operands, result = aligned(call)
    both = len(operands) == 2
    return Rule(operands=operands, outputs=(result,), linear=(frozenset({0, 1}),) if both else ())


def _multiplied(call: Call) -> Rule:
    operands, result = aligned(call)
    linear = tuple(frozenset({place}) for place in range(len(operands))) if len(operands) == 2 else (frozenset({0}),)
    # A number squared is one operand twice, and not linear in it.
    twice = len(set(call.op.operands)) < len(call.op.operands)
    return Rule(operands=operands, outputs=(result,), linear=() if twice else linear)


def _divided(call: Call) -> Rule:
    operands, result = aligned(call)
    over_itself = len(set(call.op.operands)) < len(call.op.operands)
    over = isinstance(call.argument("self"), Ref) and call.argument("rounding_mode") is None and not over_itself
    return Rule(operands=operands, outputs=(result,), linear=(frozenset({0}),) if over else ())


def _prelu(call: Call) -> Rule:
    """The slope is one number, or one a channel (dim 1)."""
    result = LETTERS[: len(call.output)]
    slope = "." if call.shape(1) == (_ONE,) or len(result) < 2 else result[1]
    return Rule(operands=(result, slope), outputs=(result,))


def _with_underscore(table: Mapping[str, Callable[[Call], Rule | None]]) -> dict[str, Callable[[Call], Rule | None]]:
    """The same for the forms that write into their first operand."""
    return {**table, **{f"{name}_": rule for name, rule in table.items() if not name.endswith("_")}}


POINTWISE: Final[Mapping[str, Callable[[Call], Rule | None]]] = _with_underscore({
    **dict.fromkeys(_PLAIN | _RANDOM | FILLED_LIKE, _plain),
    **dict.fromkeys(("clone", "contiguous", "neg"), _copied),
    **dict.fromkeys(("to", "_to_copy", "type_as", "float"), _converted),
    **dict.fromkeys(("add", "sub"), _added),
    "mul": _multiplied,
    "div": _divided,
    "prelu": _prelu,
})  # fmt: skip
