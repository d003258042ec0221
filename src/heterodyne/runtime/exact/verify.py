"""Law 1, checked: the loss and the gradients of a plan against those of one device on the same global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from heterodyne.errors import CaptureError, DataError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.plan.placement import Placement
from heterodyne.runtime.exact.weighting import sum_of_parts
from heterodyne.runtime.slices import GlobalBatchLike, as_source, union
from heterodyne.runtime.stages.forward import Forward, Precision
from heterodyne.runtime.weights.trainable import trainable_parameters

__all__ = ["BAR", "GradientErrors", "compare", "gradients_after", "one_device_gradients", "rounding_bar"]

BAR = 1e-5  # of fp32 on the host: another order of the same additions
_BAR_ELSEWHERE = 2e-3  # on accelerators the size of a batch decides which kernel runs, and in what precision
_BAR_OF_HALF = 3e-2
_NOTHING = 1e-6

Result = TypeVar("Result")


def rounding_bar(device: torch.device, precision: Precision = "fp32") -> float:
    """Return the relative difference up to which two orders of the same additions may differ."""
    if precision != "fp32":
        return _BAR_OF_HALF
    return BAR if device.type == "cpu" else _BAR_ELSEWHERE


@dataclass(frozen=True, kw_only=True)
class GradientErrors:
    """Relative errors. ``gradients``: (parameter, error), the largest first."""

    loss: float
    gradients: tuple[tuple[str, float], ...]

    @property
    def largest(self) -> float:
        """The largest error of loss and gradients; not a number if any of them is not."""
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
    forward = Forward(module, graph, device=device, precision=precision, seed=seed)
    parts = [
        ([sample for first, size in spans for sample in range(first, first + size)], union(source, spans, graph))
        for spans in pieces
    ]
    if graph.loss.reduction == "terms" and len(pieces) > 1:
        raise PlanError(
            "the loss has terms with denominators of their own, and the model mixes samples (BatchNorm), so one device can only follow "
            "a plan with one micro-step: give the plan fewer, larger micro-batches"
        )

    def run(inputs: Mapping[str, Tensor], samples: Sequence[int], weight: float) -> float:
        draws = forward.draws(step, samples)
        loss = forward.loss(inputs, draws)
        forward.backward(loss, weight, draws)
        return loss.item()

    summed, gradients = gradients_after(
        lambda: sum_of_parts(loss_count, parts, dict(module.named_buffers()), run), parameters
    )
    if summed is None:
        raise DataError("no sample of the batch has a label that the loss counts, so its mean does not exist")
    return summed[0], gradients


def gradients_after(
    run: Callable[[], Result], parameters: Mapping[str, nn.Parameter]
) -> tuple[Result, dict[str, Tensor]]:
    """Return what ``run`` returns, and the gradients that it leaves, on the host; ``p.grad`` is None before and after.

    Raises CaptureError for a sparse gradient.
    """
    for parameter in parameters.values():
        parameter.grad = None
    result = run()
    gradients = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise CaptureError(
                f"{name!r} has a sparse gradient, and gradients are reduced in flat buckets: make its embedding with sparse=False"
            )
        if parameter.grad is not None:
            gradients[name] = parameter.grad.detach().cpu()
        parameter.grad = None
    return result, gradients


def compare(
    loss: float, gradients: Mapping[str, Tensor], reference_loss: float, reference: Mapping[str, Tensor]
) -> GradientErrors:
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
        scale = norm if norm > _NOTHING * whole else whole
        errors.append((name, difference / scale if scale else difference))
    gap = abs(loss - reference_loss)
    return GradientErrors(
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
