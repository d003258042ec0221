"""Which tensors may be views of parameters: who reads them reads these, where parameters come and go."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.size import ZERO

__all__ = ["parameters_seen_through"]


@lru_cache(maxsize=16)
def parameters_seen_through(graph: ModelGraph) -> Mapping[str, frozenset[str]]:
    """For each op whose results may lie in the memory of parameters, which these are.

    That is what moves no bytes, and what is made of parameters alone: whether ``reshape`` or ``contiguous`` copies depends on how a
    parameter lies in memory, which its capture need not know. One too many is gathered once too often, and no more.
    """
    parameters = {parameter.name for parameter in graph.parameters}
    found: dict[str, frozenset[str]] = {}
    for op in graph.ops:
        through = [found[name] for name in op.inputs if name in found]
        own = parameters.intersection(op.parameters)
        moves_nothing = op.bytes_read == op.bytes_written == ZERO
        alone = len(through) == len(op.inputs) or op.kind.endswith("_as")
        if (own or through) and (moves_nothing or alone):
            found[op.name] = frozenset(own.union(*through))
    return found
