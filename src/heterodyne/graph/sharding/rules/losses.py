"""Losses: sums over samples, and over classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.graph.ir import Ref
from heterodyne.graph.sharding.rule import LETTERS, Call, Rule
from heterodyne.graph.sharding.rules.pointwise import aligned

__all__ = ["LOSSES"]

NONE, MEAN, PARTIAL = 0, 1, 2
"""How torch counts its reductions."""


def _cross_entropy(call: Call) -> Rule | None:
    """Logits ``NC...``, labels ``N...``, weights of the classes ``C``. Classes may be cut: only maxima and sums are exchanged (``C``).

    A mean over samples that are cut is each device's sum over what all of them count.
    """
    rank = len(call.shape(0))
    if rank < 2 or len(call.shape(1)) != rank - 1:
        return None  # one sample without a batch, or labels that are probabilities
    more = LETTERS[: rank - 2]
    weights = (".",) if isinstance(call.argument("weight"), Ref) else ()
    kept = call.argument("reduction") == NONE
    return Rule(
        operands=(f"NC{more}", f"N{more}", *weights),
        outputs=(f"N{more}" if kept else "",),
        summed="" if kept else f"N{more}",
        exchanged="C",
    )


def _nll_loss(call: Call) -> Rule | None:
    """As cross entropy of what is already log-probabilities; the classes have to be whole."""
    rank = len(call.shape(0))
    if rank < 2 or call.argument("reduction") == MEAN:
        return None  # a mean divides by a count of its own
    more = LETTERS[: rank - 2]
    weights = (".",) if isinstance(call.argument("weight"), Ref) else ()
    kept = call.argument("reduction") == NONE
    outputs = (f"N{more}" if kept else "", *("" for _ in call.op.outputs[1:]))
    return Rule(operands=(f"N.{more}", f"N{more}", *weights), outputs=outputs, summed="" if kept else f"N{more}")


def _pointwise_loss(call: Call) -> Rule | None:
    """``mse_loss`` and its like: a mean or a sum over everything."""
    operands = call.specs[:2]
    if len(operands) < 2 or operands[0].shape != operands[1].shape:
        return None
    letters = LETTERS[: len(call.shape(0))]
    reduction = call.argument("reduction")
    more = (
        aligned(Call(call.op, call.specs))[0][2:]
        if reduction == NONE
        else tuple("." * len(s.shape) for s in call.specs[2:])
    )
    if len(call.specs) > 2 and reduction != NONE:
        return None
    outputs = (letters if reduction == NONE else "",)
    return Rule(operands=(letters, letters, *more), outputs=outputs, summed="" if reduction == NONE else letters)


LOSSES: Final[Mapping[str, Callable[[Call], Rule | None]]] = {
    "cross_entropy_loss": _cross_entropy,
    "nll_loss_nd": _nll_loss,
    **dict.fromkeys(
        ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"),
        _pointwise_loss,
    ),
}
