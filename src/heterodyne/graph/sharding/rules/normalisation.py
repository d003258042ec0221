"""Norms and softmax: they look at some dims as a whole, and leave the others free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.graph.ir import Ref
from heterodyne.graph.sharding.rule import LETTERS, Call, Rule
from heterodyne.graph.size import Size

__all__ = ["NORMALISATION"]


def _over_the_last(call: Call) -> Rule:
    """``layer_norm``, ``rms_norm``: the last dims, as many as are named, are normalised."""
    rank = len(call.shape(0))
    shape = call.argument("normalized_shape")
    normalised = len(shape) if isinstance(shape, tuple) else 1
    own = LETTERS[: rank - normalised] + "." * normalised
    weights = tuple("." * len(spec.shape) for spec in call.specs[1:])
    return Rule(operands=(own, *weights), outputs=(own,) * len(call.op.outputs))


def _softmax(call: Call) -> Rule:
    """Along a dim, which may be cut where the op is done with an exchange of maxima and sums (letter ``Z``)."""
    letters = LETTERS[: len(call.output)]
    dim = call.whole_number("dim", -1) % max(1, len(letters))
    own = letters[:dim] + "Z" + letters[dim + 1 :] if letters else ""
    return Rule(operands=(own,), outputs=(own,), exchanged="Z")


def _batch_norm(call: Call) -> Rule | None:
    """Channel by channel. Statistics of the batch are those of all devices that have samples of it (`runtime.exact.batch_norm`)."""
    rank = len(call.shape(0))
    if rank < 2:
        return None
    training = call.argument("training") is True
    own = "ac" + ("." * (rank - 2) if training else LETTERS[3 : rank + 1])
    return Rule(
        operands=(own, *("c" for _ in call.specs[1:])), outputs=(own,), only="a" if training else "", filled="c"
    )


def _instance_norm(call: Call) -> Rule | None:
    """Channel by channel of each sample."""
    rank = len(call.shape(0))
    if rank < 2:
        return None
    own = "ac" + "." * (rank - 2)
    return Rule(operands=(own, *("c" for _ in call.specs[1:])), outputs=(own,))


def _group_norm(call: Call) -> Rule | None:
    """Groups of channels of each sample; cut in whole groups."""
    groups = call.argument("num_groups")
    if not isinstance(groups, int):
        return None
    own = "ac" + "." * (len(call.shape(0)) - 2)
    weights = tuple("c" for name in ("weight", "bias") if isinstance(call.argument(name), Ref))
    return Rule(operands=(own, *weights), outputs=(own,), units={"c": Size.of(groups)}, filled="c")


NORMALISATION: Final[Mapping[str, Callable[[Call], Rule | None]]] = {
    **dict.fromkeys(("layer_norm", "rms_norm", "_fused_rms_norm"), _over_the_last),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
}
