"""A plan that names kinds of devices, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from heterodyne.plan.plan import Layout, Plan, Stage

__all__ = ["device_labels", "in_short", "width_words", "widths_in_words"]

_IN_SHORT = 2
"""Kinds of pipelines that a line has room for."""

_NAMES = {"split": "tensor", "context": "context", "replicate": "data"}


def in_short(plan: Plan) -> str:
    """``4 x (8 x H100 tensor 4 x data 2, 2 x L40S, 2 stages each) + 2 x (...)``: nodes, places, widths, stages on each place.

    Of many kinds of pipelines the largest.
    """
    label = device_labels(plan)
    count: dict[tuple[Stage, ...], int] = {}
    for pipeline in plan.pipelines:
        count[pipeline.stages] = count.get(pipeline.stages, 0) + pipeline.replicas
    parts = []
    places = {p.stages: p.groups for p in plan.pipelines}

    def size(stages: tuple[Stage, ...]) -> int:
        return count[stages] * sum(own[0].group.devices for own in places[stages] if own[0].group)

    largest = sorted(count, key=size, reverse=True)
    for stages in largest[:_IN_SHORT]:
        homes = [label[own[0]] + _of_width(own[0]) for own in places[stages]]
        alike = ", ".join(f"{len(list(run))} x {home}" for home, run in groupby(homes))
        chunks = len(stages) // len(homes)
        parts.append(f"{count[stages]} x ({alike}{f', {chunks} stages each' if chunks > 1 else ''})")
    more = len(count) - len(parts)
    return " + ".join(parts) + (f" + {more} more kinds of pipelines" if more else "")


def device_labels(plan: Plan) -> Mapping[Stage, str]:
    """Return what the devices of each stage are called: their nodes, with their kind where nodes have several."""
    stages = dict.fromkeys(stage for pipeline in plan.pipelines for stage in pipeline.stages)
    kinds: dict[str, set[str]] = {}
    for stage in stages:
        if stage.group:
            kinds.setdefault(stage.group.node, set()).add(stage.group.kind)
    return {stage: _label(stage, kinds) for stage in stages}


def _label(stage: Stage, kinds: Mapping[str, set[str]]) -> str:
    group = stage.group
    if group is None:
        return ", ".join(stage.devices)
    return " ".join([group.node] * bool(group.node) + [group.kind] * (not group.node or len(kinds[group.node]) > 1))


def _of_width(stage: Stage) -> str:
    words = widths_in_words(stage.layout)
    return f" {words}" if words else ""


def widths_in_words(layout: Layout) -> str:
    """``tensor 4 x data 2``; "" for one device."""
    axes = sorted(layout.axes, key=lambda axis: list(_NAMES).index(axis.kind))
    return width_words((_NAMES[axis.kind], len(axis.shares)) for axis in axes)


def width_words(widths: Iterable[tuple[str, int]]) -> str:
    """``tensor 4 x data 2`` of axes by name and width; "" where none is wider than 1."""
    return " x ".join(f"{name} {width}" for name, width in widths if width > 1)
