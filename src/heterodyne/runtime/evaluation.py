"""The loss on a batch without training, spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from heterodyne.loss_count import LossCount
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.placement import Placement, RankRole
from heterodyne.plan.program import Action
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.exact.weighting import Weights, known_loss, part_statistics, weighted_sum
from heterodyne.runtime.slices import BatchSource
from heterodyne.runtime.stages.stage_builder import StageRuntime
from heterodyne.runtime.weights.sharded_parameters import ShardedParameters

__all__ = ["eval_mode", "evaluate", "evaluation_parts"]


def evaluate(
    module: nn.Module,
    source: BatchSource,
    *,
    placement: Placement,
    rank: int,
    parts: StageRuntime,
    loss_count: LossCount,
    gradients: bool,
    control: ProcessGroup,
    numbers: Mapping[str, Tensor],
    sharded: ShardedParameters | None = None,
) -> tuple[float, float]:
    """The loss of the whole batch, and what it counts, on every rank. Collective over ``control``.

    Each pipeline takes its parts through its stages one after the other.

    Args:
        gradients: a forward may ask for one (torch.autograd.grad), so autograd is on.
        numbers: that stages are given beside the batch.
        sharded: parameters to gather, stage by stage; where pipelines share them, these run all parts through one stage after the other,
            or through all of them, since not all have as many parts.
    """
    stages, transfers = parts.stages, parts.transfers
    role = placement.places[rank]
    first, sizes = (0, ()) if role.pipeline is None else evaluation_parts(placement, source.size)[role.pipeline]
    if loss_count.together:
        sizes = (sum(sizes),)
    ends = role.spans_of(first, sizes) if role.last else ()
    _, own = part_statistics(loss_count, source, ends, dict(module.named_buffers()))
    weights = Weights(loss_count, own, source.size, control, answers=role.answers)
    losses: dict[int, float] = {}
    if role.pipeline is not None:
        if transfers is not None:
            transfers.begin([_sends(other, len(sizes)) for other in placement.places], sizes)
        stages.begin()
        several = sharded is not None and len({other.pipeline for other in placement.places} - {None}) > 1
        with (
            eval_mode(module),
            stages.evaluating(),
            torch.set_grad_enabled(gradients),
            _gathered(sharded, several=several, alone=transfers is None) as gathered,
        ):
            spans = {stage: role.spans_of(first, sizes, stage) for stage in role.stages}
            for stage, index in _order(role.stages, len(sizes), by_stage=several and transfers is None):
                start, samples = spans[stage][index]
                with gathered(stage):
                    if not samples and not (loss_count.together and stage == role.stages[-1] and role.last):
                        continue
                    inputs = source.samples(start, samples)
                    inputs = {**inputs, **weights.divisors, **numbers}
                    loss = stages.evaluate(stage, index, inputs, range(start, start + samples))
                if loss is not None:
                    losses[index] = loss.item()
        if transfers is not None:
            transfers.settle()
    defined = weights.is_defined
    sums = torch.tensor(
        weighted_sum([weights.of(index) if defined else 0.0 for index in losses], list(losses.values())),
        dtype=torch.float64,
    )
    control.all_reduce(sums).wait()
    return (known_loss(sums) if defined else float("nan")), (weights.total if defined else 0.0)


@contextmanager
def _gathered(
    sharded: ShardedParameters | None, *, several: bool, alone: bool
) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Yields what surrounds each pass of a stage, so that its parameters are there. ``alone``: the rank has all stages of its pipeline."""
    if sharded is None:
        yield lambda _: nullcontext()
    elif not several:
        yield sharded.unsharded
    else:
        with sharded.in_turn(all_at_once=not alone) as go_on:
            reached: set[int] = set()

            def around(stage: int) -> AbstractContextManager[None]:
                if stage not in reached:
                    reached.add(stage)
                    go_on(stage)
                return nullcontext()

            yield around


def _order(stages: Sequence[int], parts: int, *, by_stage: bool) -> Iterator[tuple[int, int]]:
    if by_stage:
        return ((stage, index) for stage in stages for index in range(parts))
    return ((stage, index) for index in range(parts) for stage in stages)


def evaluation_parts(placement: Placement, size: int) -> dict[int, tuple[int, tuple[int, ...]]]:
    """For each pipeline its first sample and the sizes of its parts: shares as in the plan, parts no larger than its micro-batches."""
    pipelines = {role.pipeline: role.micro_batches for role in placement.places if role.pipeline is not None}
    planned = sum(micro_batches.samples for micro_batches in pipelines.values())
    reached = given = 0
    parts = {}
    for pipeline, micro_batches in sorted(pipelines.items()):
        # Cutting at rounded running totals gives each pipeline its share up to one sample, and all of them the whole.
        reached += micro_batches.samples
        last = round(size * reached / planned)
        parts[pipeline] = (given, MicroBatches.of_samples(last - given, max(micro_batches.sizes, default=1)).sizes)
        given = last
    return parts


def _sends(role: RankRole, parts: int) -> tuple[Action, ...]:
    """What a rank sends, in order."""
    return tuple(Action(stage, "SEND_F", index) for index in range(parts) for stage in role.stages)


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Every part of the module in eval mode while the block runs, and as it was afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
