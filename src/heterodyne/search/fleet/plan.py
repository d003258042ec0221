"""The compact plan of the fleet search: alike pipelines are one template and a replica count, so 25,000 devices take a few lines.

It is private to this package: `written` converts it to a `plan.plan.Plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from types import MappingProxyType
from typing import Literal, get_args

from heterodyne.cost.layers import Widths
from heterodyne.plan.schedules import SCHEDULES

__all__ = [
    "INTERLEAVED", "LAYOUTS", "SPLIT", "ZERO_LEVELS", "Candidate", "Layout", "Mix", "Predicted", "ScheduleName", "Template",
    "TemplateGroup", "TemplatePlan", "TemplateStage", "chunked", "mix_of", "suits",
]  # fmt: skip

ScheduleName = Literal["1F1B", "GPipe", "ZBH1", "ZBH2", "Interleaved1F1B", "InterleavedZeroBubble"]
"""Those of `plan.schedules` that a search over fleets chooses from."""
INTERLEAVED: frozenset[ScheduleName] = frozenset({"Interleaved1F1B", "InterleavedZeroBubble"})
"""They run several stages on a place; the others one."""
SPLIT: frozenset[ScheduleName] = frozenset(name for name in get_args(ScheduleName) if SCHEDULES[name].halves)
"""They run the two halves of a backward apart."""
Layout = Literal["stages", "pipelines"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_ALONE = Widths()
ZERO_LEVELS = (0, 1, 2, 3)
"""Of state sharding (ZeRO, Rajbhandari et al., SC 2020): nothing, the state of the optimizer, gradients too, parameters too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateStage:
    """Layers ``[start, stop)`` on devices of one pool that divide the work by some `Widths`."""

    pool: str
    start: int
    stop: int
    widths: Widths = _ALONE
    recompute: bool = False

    @property
    def devices(self) -> int:
        return self.widths.devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """One pipeline: its stages in layer order, and its micro-batch size.

    A pipeline rank (*place*) runs stages ``i``, ``i + places``, ``i + 2 places``, ... (virtual stages, Narayanan et al., SC 2021): they
    have the same devices, so the same pool, widths and recompute.

    Args:
        chunks: virtual stages per rank.

    Raises ValueError if the stages of a rank are not alike, or their number does not fit.
    """

    micro_batch: int
    stages: tuple[TemplateStage, ...]
    chunks: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A search looks templates up far more often than it makes them.
        object.__setattr__(self, "_hash", hash((self.micro_batch, self.stages, self.chunks)))
        if self.chunks != 1:
            self._require_places()

    def _require_places(self) -> None:
        if self.chunks < 1 or len(self.stages) % self.chunks:
            raise ValueError(f"{len(self.stages)} stages cannot be {self.chunks} on each place")
        places = self.places
        for number, stage in enumerate(self.stages):
            home = self.stages[number % places]
            if (stage.pool, stage.widths, stage.recompute) != (home.pool, home.widths, home.recompute):
                raise ValueError(f"stages {number % places} and {number} share a place, and are not alike")

    def __hash__(self) -> int:
        return self._hash

    @property
    def places(self) -> int:
        return len(self.stages) // self.chunks

    @property
    def homes(self) -> tuple[TemplateStage, ...]:
        """The first stage of each pipeline rank, which has the devices of all of them."""
        return self.stages if self.chunks == 1 else self.stages[: self.places]

    @property
    def devices(self) -> Mapping[str, int]:
        """Devices by pool; a pipeline rank counts once."""
        return _devices(self)


@lru_cache(maxsize=1 << 14)
def _devices(template: Template) -> Mapping[str, int]:
    count: dict[str, int] = {}
    for stage in template.homes:
        count[stage.pool] = count.get(stage.pool, 0) + stage.devices
    return MappingProxyType(count)


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateGroup:
    """Replicas of one template, with the same number of micro-batches each."""

    template: Template
    replicas: int
    num_microbatches: int

    @property
    def capacity(self) -> int:
        """Samples, if every micro-batch is full."""
        return self.replicas * self.num_microbatches * self.template.micro_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplatePlan:
    """Groups of alike pipelines that divide a global batch.

    The groups can hold at least ``global_batch`` samples; where they can hold more, micro-batches of the last pipelines of the last
    group are not full.

    Args:
        layout: what shares a node: replicas of a stage (``stages``), or the stages of a pipeline (``pipelines``).
        zero: the ZeRO level over all devices that hold a layer, of `ZERO_LEVELS`.
    """

    groups: tuple[TemplateGroup, ...]
    global_batch: int
    schedule: ScheduleName = "1F1B"
    layout: Layout = "stages"
    zero: int = 1

    @property
    def mix(self) -> Mix:
        """The templates of all groups."""
        return mix_of((group.template, group.replicas) for group in self.groups)

    @property
    def pipelines(self) -> int:
        return sum(group.replicas for group in self.groups)

    @property
    def devices(self) -> Mapping[str, int]:
        """By pool."""
        count: dict[str, int] = {}
        for group in self.groups:
            for pool, devices in group.template.devices.items():
                count[pool] = count.get(pool, 0) + group.replicas * devices
        return count


def suits(schedule: ScheduleName, templates: Sequence[Template]) -> bool:
    """Whether pipelines of these templates can run together under a schedule.

    Interleaved schedules need a rank with several virtual stages; pipelines without run under them with one.
    """
    return (schedule in INTERLEAVED) == any(template.chunks > 1 for template in templates)


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
class Candidate:
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


def chunked(template: Template, chunks: int) -> Iterator[Template]:
    """The template with ``chunks`` virtual stages on each rank, the longer ones first and then last; nothing where there are too few layers
    or ranks.

    Every virtual stage has at least one layer: a rank with fewer layers than virtual stages takes some from the rank with most.
    """
    places = template.places
    layers = template.stages[-1].stop
    if chunks > 1 and (places < 2 or places * chunks > layers):
        return
    counts = [sum(stage.stop - stage.start for stage in template.stages[place::places]) for place in range(places)]
    found: dict[Template, None] = {}
    for longer_first in (True, False):
        sizes = [0] * (places * chunks)
        for place, count in enumerate(counts):
            each, rest = divmod(count, chunks)
            for chunk in range(chunks):
                longer = chunk < rest if longer_first else chunk >= chunks - rest
                sizes[chunk * places + place] = max(1, each + longer)
        while sum(sizes) > layers:
            most = max(range(len(sizes)), key=sizes.__getitem__)
            sizes[most] -= 1
        found[_of_sizes(template, chunks, sizes)] = None
    yield from found


def _of_sizes(template: Template, chunks: int, sizes: Sequence[int]) -> Template:
    stops = list(accumulate(sizes))
    stages = tuple(
        replace(template.homes[number % template.places], start=stop - size, stop=stop)
        for number, (size, stop) in enumerate(zip(sizes, stops, strict=True))
    )
    return replace(template, stages=stages, chunks=chunks)
