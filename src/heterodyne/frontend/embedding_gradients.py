"""Gradients of embeddings that no plan has: sparse ones, and those that are divided by how often a row is looked up in a batch."""

from __future__ import annotations

from torch import fx

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import argument
from heterodyne.frontend.export import Traced
from heterodyne.frontend.faults import line_of

__all__ = ["refuse_embedding_gradients"]

_REFUSED = {
    "sparse": "is sparse, and gradients are reduced in flat buckets",
    "scale_grad_by_freq": "is divided by how often each row is looked up in the whole batch, and each device sees its own samples",
}


def refuse_embedding_gradients(traced: Traced) -> None:
    """Raise CaptureError, with the line and the parameter, for an embedding whose gradient is one of these."""
    for node in traced.graph.nodes:
        weight = argument(node, "weight")
        for option, why in _REFUSED.items():
            if argument(node, option) is True and isinstance(weight, fx.Node):
                role = traced.roles.get(weight)
                whose = f" of {role.name!r}" if role is not None else ""
                place = f"{line}\n" if (line := line_of(node, full=True)) else ""
                raise CaptureError(f"{place}the gradient{whose} {why}: make the embedding with {option}=False.")
