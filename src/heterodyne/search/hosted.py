"""Pipelines in which activations wait in the memory of hosts, where devices have no room and that is faster than computing them again.

The first blocks of a stage go first: what is behind them hides that they leave, and that they come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from heterodyne.cost.model import CostModel
from heterodyne.graph.ir import Block
from heterodyne.plan.plan import Pipeline, Stage
from heterodyne.search.predict import with_stages

__all__ = ["can_be_hosted", "hosted", "reloading"]


def can_be_hosted(model: CostModel, device: str) -> bool:
    """Whether it has a host apart from itself, and what copies there take was measured."""
    return model.cluster.device(device).backend != "cpu" and model.measured(device).host_copy_s_per_byte > 0


def hosted(model: CostModel, pipeline: Pipeline, short: Mapping[str, int], in_flight: Sequence[int]) -> Pipeline:
    """The pipeline with as many activations on hosts as the devices ``short`` of memory lack; as it is if one of them cannot.

    ``in_flight``: for each stage how many micro-batches it holds at a time.
    """
    size = max(pipeline.micro_batches.sizes)
    chosen: dict[int, set[int]] = {}
    for device, lacking in short.items():
        if not can_be_hosted(model, device):
            return pipeline
        memory, freed, most = model.device_memory[device], 0.0, 0
        for number, block in _in_order(model, pipeline, device):
            if freed - 3 * most >= lacking:
                break
            held = memory.activations(size, (block.start, block.stop))
            most = max(most, held)  # so many are on the device at a time: on their way out, in use, on their way back
            freed += in_flight[number] * held
            chosen.setdefault(number, set()).add(block.index)
    return with_stages(
        pipeline, lambda n, stage: stage.model_copy(update={"offload_activations": tuple(sorted(chosen.get(n, ())))})
    )


def reloading(pipeline: Pipeline) -> Iterator[Pipeline]:
    """The same with activations that begin to come back before their backwards, where places wait for each other anyway."""
    if len(pipeline.places) < 2 or not any(stage.offload_activations for stage in pipeline.stages):
        return
    for ahead in (0, 1):

        def changed(_: int, stage: Stage, ahead: int = ahead) -> Stage:
            return stage.model_copy(update={"reload_ahead": ahead}) if stage.offload_activations else stage

        yield with_stages(pipeline, changed)


def _in_order(model: CostModel, pipeline: Pipeline, device: str) -> list[tuple[int, Block]]:
    """Stages and blocks, those first that have most blocks of their stage behind them."""
    found = []
    for number, stage in enumerate(pipeline.stages):
        own = [b for b in model.graph.blocks if stage.ops[0] <= b.start < b.stop <= stage.ops[1]]
        if device in stage.devices:
            found += [(place - len(own), number, block) for place, block in enumerate(own)]
    return [(number, block) for _, number, block in sorted(found, key=lambda each: each[:2])]
