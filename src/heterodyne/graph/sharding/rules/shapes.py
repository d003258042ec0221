"""Ops that lay the same elements out in another shape, or take some of them by their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from heterodyne.graph.sharding.rule import LETTERS, Call, Rule, but_samples, common_units
from heterodyne.graph.size import Size

__all__ = ["SHAPES", "regrouped"]

_ONE: Final = Size.of(1)


def regrouped(before: tuple[Size, ...], after: tuple[Size, ...]) -> Iterator[tuple[range, range]]:
    """The smallest runs of dims that hold the same elements before and after."""
    i = j = 0
    while i < len(before) or j < len(after):
        first, second = i, j
        left, right = _ONE, _ONE
        while True:
            if left == right and i > first and j > second:
                break
            if i < len(before) and (j >= len(after) or left(2) * 1.0 <= right(2)) and not (left == right and i > first):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            elif i < len(before):
                left, i = left * before[i], i + 1
            else:
                break
        yield range(first, i), range(second, j)


def _reshape(call: Call) -> Rule | None:
    """The first dim of each run of dims, if its cuts are cuts of the first one afterwards too."""
    before, after = call.shape(0), call.output
    if call.op.target == "aten.view.dtype":
        return None  # the same bits, read as other numbers
    operand, result, units = ["."] * len(before), ["."] * len(after), {}
    names = iter(LETTERS)
    for dims, others in regrouped(before, after):
        first = next((dim for dim in dims if before[dim] != _ONE), None)
        second = next((dim for dim in others if after[dim] != _ONE), None)
        if first is None or second is None:
            continue
        name = next(names)
        operand[first] = result[second] = name
        units[name] = common_units(before[first], after[second])
    like = ("".join(result),) if len(call.specs) > 1 else ()  # what it takes its shape of
    return Rule(operands=("".join(operand), *like), outputs=("".join(result),), units=units, linear=(frozenset({0}),))


def _transpose(call: Call) -> Rule:
    letters = list(LETTERS[: len(call.shape(0))])
    result = list(letters)
    if letters:
        named = ("axis0", "axis1") if call.op.kind == "swapaxes" else ("dim0", "dim1")
        a, b = (call.whole_number(name, 0) % len(letters) for name in named)
        result[a], result[b] = result[b], result[a]
    return Rule(operands=("".join(letters),), outputs=("".join(result),), linear=(frozenset({0}),))


def _turned(call: Call) -> Rule:
    """``t``, ``mT`` and the like: the last two dims change places."""
    letters = LETTERS[: len(call.shape(0))]
    result = letters[:-2] + letters[:-3:-1] if len(letters) > 1 else letters
    if call.op.kind == "numpy_T":
        result = letters[::-1]
    return Rule(operands=(letters,), outputs=(result,), linear=(frozenset({0}),))


def _permute(call: Call) -> Rule:
    letters = LETTERS[: len(call.shape(0))]
    result = "".join(letters[dim] for dim in call.dims("dims", len(letters)))
    return Rule(operands=(letters,), outputs=(result,), linear=(frozenset({0}),))


def _unsqueeze(call: Call) -> Rule:
    letters = LETTERS[: len(call.shape(0))]
    dim = call.whole_number("dim", 0) % (len(letters) + 1)
    return Rule(operands=(letters,), outputs=(letters[:dim] + "." + letters[dim:],), linear=(frozenset({0}),))


def _squeeze(call: Call) -> Rule:
    letters = LETTERS[: len(call.shape(0))]
    dims = call.dims("dim", len(letters))
    gone = {dim for dim in dims if call.shape(0)[dim] == _ONE}
    operand = "".join("." if dim in gone else x for dim, x in enumerate(letters))
    return Rule(operands=(operand,), outputs=(operand.replace(".", ""),), linear=(frozenset({0}),))


def _expand(call: Call) -> Rule:
    """A dim of 1 becomes a longer one, which each device may have a slice of."""
    result = LETTERS[: len(call.output)]
    own = result[len(result) - len(call.shape(0)) :]
    sizes = zip(own, call.shape(0), call.output[len(result) - len(own) :], strict=True)
    operand = "".join("." if size != out else letter for letter, size, out in sizes)
    like = (result,) if len(call.specs) > 1 else ()  # what it takes its shape of
    return Rule(operands=(operand, *like), outputs=(result,), linear=(frozenset({0}),))


def _slice(call: Call) -> Rule:
    """A slice of a dim; the others, and this one if all of it is taken, may be cut."""
    letters = LETTERS[: len(call.shape(0))]
    dim = call.whole_number("dim", 0) % max(1, len(letters))
    all_of_it = call.shape(0) == call.output and call.op.kind == "slice"  # `narrow` would name more than a part has
    own = letters if all_of_it else letters[:dim] + "." + letters[dim + 1 :]
    return Rule(operands=(own,), outputs=(own,), linear=(frozenset({0}),))


def _select(call: Call) -> Rule:
    letters = LETTERS[: len(call.shape(0))]
    dim = call.whole_number("dim", 0) % max(1, len(letters))
    own = letters[:dim] + "." + letters[dim + 1 :]
    return Rule(operands=(own,), outputs=(own.replace(".", ""),), linear=(frozenset({0}),))


def _parts(call: Call) -> Rule:
    """``split``, ``chunk``, ``unbind``: that dim has to be whole."""
    letters = LETTERS[: len(call.shape(0))]
    dim = call.whole_number("dim", 0) % max(1, len(letters))
    own = letters[:dim] + "." + letters[dim + 1 :]
    result = own if len(call.output) == len(letters) else own.replace(".", "")
    return Rule(operands=(own,), outputs=(result,) * len(call.op.outputs), linear=(frozenset({0}),))


def _cat(call: Call) -> Rule:
    letters = LETTERS[: len(call.output)]
    dim = call.whole_number("dim", 0) % max(1, len(letters))
    own = letters[:dim] + "." + letters[dim + 1 :]
    # An empty tensor of one dim goes with tensors of any shape.
    operands = tuple(own if len(spec.shape) == len(own) else "." * len(spec.shape) for spec in call.specs)
    return Rule(operands=operands, outputs=(own,), linear=(frozenset(range(len(call.specs))),))


def _stack(call: Call) -> Rule:
    letters = LETTERS[: len(call.shape(0))]
    dim = call.whole_number("dim", 0) % (len(letters) + 1)
    every = frozenset(range(len(call.specs)))
    result = letters[:dim] + "." + letters[dim:]
    return Rule(operands=(letters,) * len(call.specs), outputs=(result,), linear=(every,))


def _pad(call: Call) -> Rule | None:
    """The dims that are not padded, which are the first ones."""
    pad = call.argument("pad")
    if not isinstance(pad, tuple):
        return None
    letters = LETTERS[: len(call.output)]
    free = len(letters) - len(pad) // 2
    own = letters[:free] + "." * (len(letters) - free)
    linear = (frozenset({0}),) if call.argument("value") in (None, 0, 0.0) else ()
    around = call.argument("mode") not in (None, "constant")
    filled = but_samples(own, len(pad) // 2) if around else ""
    return Rule(operands=(own,), outputs=(own,), linear=linear, filled=filled)


def _flip(call: Call) -> Rule:
    letters = LETTERS[: len(call.output)]
    turned = call.dims("dims", len(letters))
    own = "".join("." if dim in turned else x for dim, x in enumerate(letters))
    return Rule(operands=(own,), outputs=(own,), linear=(frozenset({0}),))


def _triangle(call: Call) -> Rule:
    letters = LETTERS[: len(call.output) - 2] + ".."
    return Rule(operands=(letters,), outputs=(letters,), linear=(frozenset({0}),))


def _repeat_interleave(call: Call) -> Rule | None:
    """Each element of a dim as often as is said; its cuts are cuts of the longer dim."""
    if not isinstance(call.argument("repeats"), int) or call.argument("dim") is None:
        return None
    letters = LETTERS[: len(call.output)]
    dim = call.whole_number("dim", 0) % len(letters)
    units = {letters[dim]: common_units(call.shape(0)[dim], call.output[dim])}
    return Rule(operands=(letters,), outputs=(letters,), units=units, linear=(frozenset({0}),))


SHAPES: Final[Mapping[str, Callable[[Call], Rule | None]]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("t", "mT", "numpy_T", "adjoint"), _turned),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("slice", "narrow"), _slice),
    "select": _select,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk"), _parts),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "stack": _stack,
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    "flip": _flip,
    **dict.fromkeys(("tril", "triu"), _triangle),
    "repeat_interleave": _repeat_interleave,
}
