"""The loss on a batch without training, spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.runtime.exact.weighting import LossCount, counts
from heterodyne.runtime.forward import Forward
from heterodyne.runtime.meeting.communicator import Channel
from heterodyne.runtime.placement import Placement
from heterodyne.runtime.slices import BatchSource

__all__ = ["evaluate", "evaluation_spans"]


def evaluate(
    module: nn.Module,
    source: BatchSource,
    *,
    graph: ModelGraph,
    placement: Placement,
    rank: int,
    forward: Forward,
    loss_count: LossCount,
    control: Channel,
) -> tuple[float, float]:
    """``(loss sum, count)`` of the whole batch, on every rank. Collective over ``control``."""
    total, count = 0.0, 0.0
    buffers = dict(module.named_buffers())
    with _eval_mode(module), torch.no_grad():
        for first, size in evaluation_spans(placement, source.size)[rank]:
            inputs = source.samples(first, size)
            (own,) = counts(graph.loss, [inputs], [size], loss_count, buffers)
            if own:
                total += own * forward.loss(inputs).item()
                count += own
    if graph.loss.reduction == "sum":
        count = 1.0 if rank == placement.leader else 0.0
    sums = torch.tensor([total, count], dtype=torch.float64)
    control.all_reduce(sums).wait()
    return sums[0].item(), sums[1].item()


def evaluation_spans(placement: Placement, size: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each rank the ``(first sample, size)`` of its parts: shares as in the plan, parts no larger than its micro-batches."""
    samples = [place.micro_batches.samples for place in placement.places]
    planned = sum(samples)
    reached, spans = 0, []
    given = 0
    for place, own in zip(placement.places, samples, strict=True):
        # Cutting at rounded running totals gives each rank its share up to one sample, and all of them the whole.
        reached += own
        last = round(size * reached / planned)
        parts = MicroBatches.of_samples(last - given, max(place.micro_batches.sizes, default=1))
        spans.append(tuple((given + offset, part) for offset, part in parts.offsets()))
        given = last
    return tuple(spans)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
