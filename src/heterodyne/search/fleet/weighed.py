"""What is weighed against each other: pipelines beside each other, the plan that they make, and what it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from heterodyne.cost.layers import Widths
from heterodyne.search.fleet.plan import Template, TemplatePlan, TemplateStage

__all__ = ["Mix", "Predicted", "Weighed", "mix_of"]

Mix = tuple[tuple[Template, int], ...]
"""Templates and how many pipelines there are of each, in a fixed order (see `mix_of`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Of one step. Money and energy are None where a pool that is used has no price or no watts.

    Args:
        pipelines_s, sync_s, update_s: the longest pipeline, what shows of the exchange of gradients and parameters after it, the
            optimizer; ``step_s`` is their sum.
        usd_per_hour: of the devices; ``usd``: of the step, with the traffic.
        peak_bytes: the most that a device holds.
        fullest_bytes, peak_share: of the device with the largest share of its memory filled, what it holds and that share.
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
class Weighed:
    """A plan and what it takes."""

    plan: TemplatePlan
    predicted: Predicted


def mix_of(parts: Iterable[tuple[Template, int]]) -> Mix:
    """Alike templates counted together, in an order that does not depend on how they came."""
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
