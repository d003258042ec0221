"""Mixtures of experts in one op: tokens are free, and so are experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.graph.sharding.rule import Call, Rule

__all__ = ["EXPERTS"]


def _experts(call: Call) -> Rule:
    """Tokens, indices and weights ``n.``, the matrices of the experts ``e..``.

    Where experts are cut (e), each device adds up what its own make of all tokens. Where tokens are cut too, a row of each choice goes to
    its expert, and what that makes of it comes back.
    """
    choices = call.shape(1)[1]
    return Rule(
        operands=("n.", "n.", "n.", "e..", "e.."),
        outputs=("n.",),
        summed="e",
        together={"ne": call.specs[0].bytes * choices},
    )


EXPERTS: Final[Mapping[str, Callable[[Call], Rule | None]]] = {"experts": _experts}
