"""Who holds what under a plan: the samples of a step that each device works on, and its stages."""

from __future__ import annotations

from heterodyne.plan import Plan
from heterodyne.plan.order import is_asynchronous
from heterodyne.plan.schedules.asynchronous import IN_WORDS

__all__ = ["has_pipelines", "order_of", "samples_of", "stages_of"]


def samples_of(plan: Plan) -> dict[str, int]:
    """For each device of a pipeline the samples of a step in its stage: all of the pipeline's, or its part beside others."""
    samples: dict[str, int] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            cuts = [stage.slices(size) for size in pipeline.micro_batches.sizes]
            for place, device in enumerate(stage.devices):
                # The stages of one device may cut a micro-batch differently: the largest part is shown.
                samples[device] = max(samples.get(device, 0), sum(cut[place][1] for cut in cuts))
    return samples


def stages_of(plan: Plan) -> dict[str, str]:
    """The stages of each device: ``0, 3``, and ``1: 0`` for stage 0 of pipeline 1 where there are several pipelines."""
    held: dict[str, str] = {}
    for number, pipeline in enumerate(plan.pipelines):
        of = f"{number}: " if len(plan.pipelines) > 1 else ""
        for device in dict.fromkeys(device for devices in pipeline.places for device in devices):
            own = (str(index) for index, stage in enumerate(pipeline.stages) if device in stage.devices)
            held[device] = of + ", ".join(own)
    return held


def has_pipelines(plan: Plan) -> bool:
    """Return whether any pipeline has more than one stage, so that stages need telling apart."""
    return any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)


def order_of(plan: Plan) -> str:
    """In which order the pipelines compute: ``schedule 1F1B``, or ``an order of its own``; of predicted weights that they are inexact."""
    if is_asynchronous(plan):
        return f"schedule {plan.schedule}, {IN_WORDS}"
    return "an order of its own" if any(pipeline.order for pipeline in plan.pipelines) else f"schedule {plan.schedule}"
