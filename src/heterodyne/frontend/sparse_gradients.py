"""Sparse gradients of embeddings, which no plan has: gradients are reduced in flat buckets, and clipped with all others."""

from __future__ import annotations

from torch import fx

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import argument
from heterodyne.frontend.export import Traced
from heterodyne.frontend.faults import line_of

__all__ = ["refuse_sparse_gradients"]


def refuse_sparse_gradients(traced: Traced) -> None:
    """Raise CaptureError, with the line and the parameter, for an embedding whose gradient is sparse."""
    for node in traced.graph.nodes:
        weight = argument(node, "weight")
        if argument(node, "sparse") is not True or not isinstance(weight, fx.Node):
            continue
        role = traced.roles.get(weight)
        whose = f" of {role.name!r}" if role is not None else ""
        place = f"{line}\n" if (line := line_of(node, full=True)) else ""
        raise CaptureError(
            f"{place}the gradient{whose} is sparse, and gradients are reduced in flat buckets: make the embedding with sparse=False."
        )
