"""Mixes of templates, and plans with their predictions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.plan import Template, TemplatePlan, TemplateStage

__all__ = ["EvaluatedPlan", "Mix", "Predicted", "mix_of"]

Mix = tuple[tuple[Template, int], ...]
"""Templates and how many pipelines there are of each, in a fixed order (see `mix_of`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Prediction of one step. Money and energy are None where a pool in use has no price or no watts.

    Args:
        pipelines_s, sync_s, update_s: the longest pipeline, the exposed sync of gradients and parameters, the optimizer update;
            ``step_s`` is their sum.
        usd_per_hour: of the devices; ``usd``: of the step, traffic included.
        peak_bytes: the largest peak memory of a device.
        fullest_bytes, peak_share: peak memory of the device with the largest fraction of its memory in use, and that fraction.
    """

    step_s: float
    pipelines_s: float
    sync_s: float
    update_s: float
    samples_per_s: float
    devices: int
    usd_per_hour: float | None
    usd: float | None
    joules: float | None
    peak_bytes: float
    fullest_bytes: float
    peak_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedPlan:
    """A plan and its prediction."""

    plan: TemplatePlan
    predicted: Predicted


def mix_of(parts: Iterable[tuple[Template, int]]) -> Mix:
    """Equal templates counted together, in a canonical order."""
    count: dict[Template, int] = {}
    for template, replicas in parts:
        count[template] = count.get(template, 0) + replicas
    known = [(*_known(template), number) for template, number in count.items() if number > 0]
    return tuple((template, number) for _, template, number in sorted(known, key=itemgetter(0)))


@lru_cache(maxsize=1 << 14)
def _known(template: Template) -> tuple[object, Template]:
    """What it is sorted by, and the one that stands for all that are equal: tables then find it without a comparison."""
    key = template.micro_batch, tuple(map(_stage_key, template.stages)), template.chunks
    return key, template


def _stage_key(stage: TemplateStage) -> tuple[str, int, int, Widths, bool]:
    return stage.pool, stage.start, stage.stop, stage.widths, stage.recompute
