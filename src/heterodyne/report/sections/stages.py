"""The stages of a plan and what their devices did: forward, backward and waiting as shares of the step, predicted and measured."""

from __future__ import annotations

from typing import Any

from heterodyne.plan import Pipeline
from heterodyne.report.plan_shares import has_pipelines, order_of
from heterodyne.report.run import Run
from heterodyne.report.step_times import StepTimes, by_rank, typical
from heterodyne.report.words import DASH, percent

__all__ = ["stage_section"]

Parts = tuple[tuple[str, tuple[str, ...]], ...]
_PASSES: Parts = (("forward", ("F",)), ("backward", ("B", "I", "W")))
_AGAIN: Parts = (("recompute", ("R",)),)
_END: Parts = (("update", ("CLIP", "STEP")), ("bubble", ("wait",)))


def stage_section(run: Run) -> dict[str, Any] | None:
    """A row for each place of each pipeline and each of its devices; None where every pipeline has one stage.

    Shares are of the same steps that the timelines show; a bubble is the part of the step in which a device computes nothing.
    """
    if run.plan is None or not has_pipelines(run.plan):
        return None
    sides = [
        (title, {t.rank: t for t in by_rank(one)})
        for title, timeline in (("predicted", run.simulated), ("measured", run.measured))
        if (one := typical(timeline)) is not None
    ]
    again = any(times.seconds("R") for _, found in sides for times in found.values())
    parts = (*_PASSES, *(_AGAIN if again else ()), *_END)
    ranks = {device: rank for rank, device in enumerate(run.devices)}
    rows = [
        {
            "pipeline": str(number),
            **_place(pipeline, devices),
            "device": device,
            "cells": [_cell(kinds, [found.get(ranks.get(device, -1)) for _, found in sides]) for _, kinds in parts],
        }
        for number, pipeline in enumerate(run.plan.pipelines)
        for devices in pipeline.places
        for device in devices
    ]
    return {
        "schedule": order_of(run.plan),
        "several": len(run.plan.pipelines) > 1,
        "rows": rows,
        "parts": [name for name, _ in parts],
        "titles": [title for title, _ in sides],
        "bubbles": [f"{title} {percent(_bubble(run, ranks, found))}" for title, found in sides],
    }


def _place(pipeline: Pipeline, devices: tuple[str, ...]) -> dict[str, str]:
    held = [(index, stage) for index, stage in enumerate(pipeline.stages) if stage.devices == devices]
    again = sum(len(stage.recompute) for _, stage in held)
    return {
        "stages": ", ".join(str(index) for index, _ in held),
        "ops": ", ".join(f"{stage.ops[0]}–{stage.ops[1] - 1}" for _, stage in held),
        "recompute": f"{again} {'block' if again == 1 else 'blocks'}" if again else DASH,
        "micro_batches": str(pipeline.micro_batches),
    }


def _cell(kinds: tuple[str, ...], sides: list[StepTimes | None]) -> list[str]:
    return [
        DASH if times is None or times.span_s <= 0 else percent(sum(map(times.seconds, kinds)) / times.span_s)
        for times in sides
    ]


def _bubble(run: Run, ranks: dict[str, int], found: dict[int, StepTimes]) -> float | None:
    """The mean of the devices that take part."""
    assert run.plan is not None  # asked before
    working = [found[ranks[d]] for d in run.plan.devices if ranks.get(d) in found]
    return sum(t.wait_s / t.span_s for t in working if t.span_s > 0) / len(working) if working else None
