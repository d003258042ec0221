"""Law 1, checked: the loss and the gradients of a plan against those of one device on the same global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heterodyne.errors import DataError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.plan.placement import Placement
from heterodyne.runtime.exact.weighting import known_loss, weighted_sum
from heterodyne.runtime.slices import GlobalBatchLike, as_source, union
from heterodyne.runtime.stages.forward import Forward, Precision
from heterodyne.runtime.weights.trainable import trainable_parameters

__all__ = ["Comparison", "compare", "one_device_gradients"]

NOTHING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Relative errors. ``gradients``: (parameter, error), the largest first."""

    loss: float
    gradients: tuple[tuple[str, float], ...]

    @property
    def largest(self) -> float:
        """Of loss and gradients; not a number if any of them is not."""
        return max([self.loss, *(error for _, error in self.gradients)], key=_rank)


def one_device_gradients(
    module: nn.Module,
    batch: GlobalBatchLike,
    *,
    graph: ModelGraph,
    placement: Placement,
    device: torch.device,
    precision: Precision,
    loss_count: LossCount,
    seed: int,
    step: int = 0,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients (on the host) of the global batch, in this process alone; ``p.grad`` is left None.

    The batch goes through the model in one piece; where samples are mixed (BatchNorm), in as many pieces as the plan has
    micro-steps, each the union of what the ranks see together. Raises DataError if nothing in the batch counts.
    """
    source = as_source(batch, graph)
    pieces = placement.micro_steps() if graph.batch_statistics else (((0, source.size),),)
    parameters = trainable_parameters(module, graph)
    for parameter in parameters.values():
        parameter.grad = None
    forward = Forward(module, graph, device=device, precision=precision, seed=seed)
    inputs = [union(source, spans, graph) for spans in pieces]
    sizes = [sum(size for _, size in spans) for spans in pieces]
    if graph.loss.reduction == "terms" and len(pieces) > 1:
        raise PlanError(
            "the loss has terms with denominators of their own, and the model mixes samples (BatchNorm), so one device can only follow "
            "a plan with one micro-step: give the plan fewer, larger micro-batches"
        )
    buffers = dict(module.named_buffers())
    own = [loss_count.statistics(part, size, buffers) for part, size in zip(inputs, sizes, strict=True)]
    whole = torch.stack(own).sum(0)
    if not loss_count.is_defined(whole):
        raise DataError("no sample of the batch has a label that the loss counts, so its mean does not exist")
    weights = [loss_count.weight(each, whole) for each in own]
    losses = []
    for spans, part, weight in zip(pieces, inputs, weights, strict=True):
        samples = [sample for first, size in spans for sample in range(first, first + size)]
        draws = forward.draws(step, samples)
        of_part = forward.loss(part, draws)
        forward.backward(of_part, weight, draws)
        losses.append(of_part.item())
    loss = known_loss(torch.tensor(weighted_sum(weights, losses), dtype=torch.float64))
    gradients = {name: p.grad.detach().cpu() for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return loss, gradients


def compare(
    loss: float, gradients: Mapping[str, Tensor], reference_loss: float, reference: Mapping[str, Tensor]
) -> Comparison:
    """The relative error of the loss and of each gradient: norm of the difference over norm of the reference, in float64.

    A gradient whose norm is below 1e-6 of that of all gradients together is zero up to rounding (the bias in front of a norm, the
    bias of attention keys): its error is relative to all gradients together. A gradient that only one side has is an error
    of 1, unless it is zero.
    """
    norms = {name: _norm(value) for name, value in reference.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    errors = []
    for name in reference.keys() | gradients.keys():
        norm = norms.get(name, 0.0)
        difference = _norm(_or_zero(gradients, name, reference) - _or_zero(reference, name, gradients))
        scale = norm if norm > NOTHING * whole else whole
        errors.append((name, difference / scale if scale else difference))
    gap = abs(loss - reference_loss)
    return Comparison(
        loss=gap / abs(reference_loss) if reference_loss else gap,
        gradients=tuple(sorted(errors, key=lambda entry: (-_rank(entry[1]), entry[0]))),
    )


def _or_zero(of: Mapping[str, Tensor], name: str, other: Mapping[str, Tensor]) -> Tensor:
    tensor = of[name] if name in of else torch.zeros_like(other[name])
    return tensor.detach().cpu().double()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().cpu().double()).item())


def _rank(error: float) -> float:
    """Not a number is the worst of errors."""
    return float("inf") if error != error else error
