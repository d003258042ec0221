"""Which blocks a stage computes again instead of keeping their activations: just as many as its memory asks for.

Every block that is not kept frees its activations, less its inputs, of each micro-batch in flight, and costs its forward once more.
Those with the most bytes freed a second go first, until the rest fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heterodyne.cost.model import CostModel
from heterodyne.graph.size import Size
from heterodyne.plan.plan import Pipeline

__all__ = ["recomputed"]


def recomputed(
    model: CostModel, pipeline: Pipeline, short: Mapping[str, int], in_flight: Sequence[int], alive: Mapping[int, Size]
) -> Pipeline:
    """The pipeline with blocks to recompute on the devices that are short of memory.

    Args:
        short: for each device the bytes that it lacks if everything is kept; nothing for those that lack nothing.
        in_flight: for each stage how many micro-batches it holds at a time.
        alive: what crosses the positions at which blocks begin, as far as they are known.
    """
    chosen: dict[int, set[int]] = {}
    for device, lacking in short.items():
        for stage, block in _chosen(model, pipeline, device, lacking, in_flight, alive):
            chosen.setdefault(stage, set()).add(block)
    if not chosen:
        return pipeline
    stages = tuple(
        stage.model_copy(update={"recompute": tuple(sorted(chosen.get(number, ())))})
        for number, stage in enumerate(pipeline.stages)
    )
    return pipeline.model_copy(update={"stages": stages})


def _chosen(
    model: CostModel,
    pipeline: Pipeline,
    device: str,
    lacking: int,
    in_flight: Sequence[int],
    alive: Mapping[int, Size],
) -> list[tuple[int, int]]:
    """(stage, block) pairs, the best first, until enough is freed; all of them if it never is."""
    compute, memory = model.compute[device], model.device_memory[device]
    size = max(pipeline.micro_batches.sizes)
    options = []
    for number, stage in enumerate(pipeline.stages):
        for block in model.graph.blocks if device in stage.devices else ():
            if not stage.ops[0] <= block.start < block.stop <= stage.ops[1]:
                continue
            ops = (block.start, block.stop)
            held = memory.activations(size, ops)
            frees = in_flight[number] * (held - alive[block.start](size)) if block.start in alive else 0.0
            if frees > 0:
                seconds = compute.seconds("F", ops, size)
                options.append((-frees / seconds if seconds > 0 else float("-inf"), number, block.index, frees, held))
    taken: list[tuple[int, int]] = []
    freed, again = 0.0, 0
    for _, number, block_index, frees, held in sorted(options):
        if freed - again >= lacking:
            break
        taken.append((number, block_index))
        freed += frees
        again = max(again, held)  # while it is recomputed, one block is there once
    return taken
