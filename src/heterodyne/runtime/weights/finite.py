"""Where a step first met a number that is not finite, in words: the rank, the stage, the block, the parameter.

Looked for only once a step has shown it, so it may take its time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heterodyne.graph.ir import ModelGraph

__all__ = ["Findings", "all_finite", "findings", "first_fault"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What one rank found in what it holds; places are those of the parameters in the order of the forward.

    Args:
        stages: of this rank.
        weight: the first parameter whose values are not finite.
        gradient: the last parameter whose gradient is not: the backward came to it first.
        largest: the parameter with the largest value, and that value.
        loss: whether the loss of one of its micro-batches is not finite.
    """

    stages: tuple[int, ...]
    weight: tuple[int, str] | None = None
    gradient: tuple[int, str] | None = None
    largest: tuple[float, str] | None = None
    loss: bool = False


def findings(
    graph: ModelGraph,
    parameters: Mapping[str, Tensor],
    of_parameters: Mapping[str, Tensor],
    losses: Sequence[Tensor],
    stages: Sequence[int],
) -> Findings:
    """Of this rank; waits for the device. ``of_parameters``: their gradients."""
    order = {name: place for place, name in enumerate(_in_forward_order(graph, parameters))}
    names = sorted(parameters, key=order.__getitem__)
    weights = [(order[n], n) for n in names if not all_finite([parameters[n]])]
    gradients = [(order[n], n) for n in names if n in of_parameters and not all_finite([of_parameters[n]])]
    sizes = [(parameters[n].detach().abs().max().item(), n) for n in names if parameters[n].numel()]
    return Findings(
        stages=tuple(stages),
        weight=min(weights, default=None),
        gradient=max(gradients, default=None),
        largest=max(sizes, default=None),
        loss=any(not all_finite([loss]) for loss in losses),
    )


def first_fault(graph: ModelGraph, found: Sequence[Findings], loss: float) -> str:
    """One sentence of what all ranks found, in order of rank."""
    weights = [(of.weight, rank) for rank, of in enumerate(found) if of.weight is not None]
    gradients = [(of.gradient, rank) for rank, of in enumerate(found) if of.gradient is not None]
    if weights:
        (_, name), rank = min(weights)
        return f"{name} has values that are not finite ({_place(graph, name, rank, found)})"
    if not math.isfinite(loss):
        ranks = [rank for rank, of in enumerate(found) if of.loss]
        size, name = max((of.largest for of in found if of.largest is not None), default=(0.0, ""))
        where = f", first on rank {ranks[0]}" if ranks else ""
        largest = (
            f"; every weight is finite, the largest is {size:.3g} in {name} ({_block(graph, name)})" if name else ""
        )
        return f"the loss is {loss}{where}{largest}"
    if gradients:
        (_, name), rank = max(gradients)
        return f"the gradient of {name} is not finite ({_place(graph, name, rank, found)})"
    return "the norm of the gradient is too large for its precision"


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every number in them is; waits for the device."""
    return all(
        bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()
    )


def _place(graph: ModelGraph, name: str, rank: int, found: Sequence[Findings]) -> str:
    stages = found[rank].stages
    stage = f", stage {stages[0]}" if len(stages) == 1 else f", stages {', '.join(map(str, stages))}" if stages else ""
    return f"rank {rank}{stage}, {_block(graph, name)}"


def _block(graph: ModelGraph, name: str) -> str:
    found = next((b.name for b in graph.blocks if name in {n for op in graph.ops_of(b) for n in op.parameters}), None)
    return "outside of the blocks" if found is None else f"block {found}"


def _in_forward_order(graph: ModelGraph, parameters: Mapping[str, Tensor]) -> list[str]:
    """As the ops read them; those that the graph does not know by name come last."""
    return list(dict.fromkeys([*(n for op in graph.ops for n in op.parameters if n in parameters), *parameters]))
