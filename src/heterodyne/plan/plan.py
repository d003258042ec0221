"""The Plan: the one artefact between thinking and doing, a file that a person can read, diff and edit.

    Plan
      pipelines: each takes a share of the global batch, cut into micro-batches; alike ones are written once, with a count
        stages: each runs a contiguous range of the graph's ops on devices, by their ids or as so many of a kind
          regions: a TaskGraph of that stage, with its layout on the group
          recompute: blocks whose activations are computed again, but for what keep names; offload_activations: those on the host;
          state_shares: who keeps how much optimizer state

Pipelines need not be alike. They take contiguous slices of the global batch, in their order: the first pipeline the
first samples. Devices that are in no pipeline are `idle`. This module says what a plan *is*; `plan.bind` gives ids to the devices of a
plan that names only kinds, `plan.check` says whether it fits a model and a cluster, `plan.lower` what each rank does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, model_validator

from heterodyne.arguments import checked_arguments
from heterodyne.documents import Whole
from heterodyne.errors import PlanError
from heterodyne.graph.sharding.price import FLOPS_PER_BYTE, LATENCY_BYTES
from heterodyne.json_files import parse_json, readable_json
from heterodyne.plan.mesh import Axis, Layout, PlanPart, count_of, nested_slices
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.precision import Precisions
from heterodyne.text_files import read_text, write_text

__all__ = ["PLAN_VERSION", "Axis", "Exchange", "Group", "Layout", "Pipeline", "Plan", "Prediction", "Region", "Stage"]

PLAN_VERSION: Final = 2


Positive = Annotated[Whole, Field(ge=1)]


def _micro_batches(value: object) -> object:
    return MicroBatches.parse(value) if isinstance(value, str) else value


def _written_as_whole(value: object) -> object:
    """In Python true and 1.0 are among 0, 1, 2 and 3."""
    if isinstance(value, bool | float):
        raise ValueError(f"{str(value).lower()} is no whole number")
    return value


class Region(PlanPart):
    """A TaskGraph of a stage. ``task_graph`` names an annotation; ``*`` is everything that has none."""

    task_graph: str = "*"
    layout: Layout


class Exchange(PlanPart):
    """The price of communication on a stage's devices, in computation: it decides how tensors are laid out (`graph.sharding.Price`).

    ``latency_bytes``: bytes that could be sent while a collective begins; ``flops_per_byte``: operations that the devices do
    together while a byte is sent.
    """

    latency_bytes: Whole = LATENCY_BYTES
    flops_per_byte: Positive = FLOPS_PER_BYTE


class Group(PlanPart):
    """Alike devices, before anybody says which: `plan.bind` chooses them.

    Args:
        kind: as the cluster calls it. ``devices``: how many.
        node: of nodes ``node`` or ``node-0``, ``node-1``..., where the cluster has such; "": of any.
        place: stages of one pipeline with the same number run on the same devices; None: on devices of their own.
        experts: devices over which one set of the experts is sharded; None: there are none, or each device has them all.
    """

    kind: str
    devices: Positive
    node: str = ""
    place: Whole | None = None
    experts: Positive | None = None


class Stage(PlanPart):
    """A contiguous cut of the graph, ops ``[start, stop)``, on ``devices``.

    Before the plan is bound there are ``blocks`` ``[start, stop)`` in place of ops, and a ``group`` in place of devices.

    ``recompute`` holds indices of blocks; ``keep`` names ops of these that keep what they make and are not run again, by their kind
    (``linear``) or by module and kind (``mlp.fc1.linear``, see `heterodyne.plan.kept`);
    ``offload_activations`` holds indices of other blocks, whose activations wait in the memory of the host for their backward;
    ``reload_ahead``: so many passes ahead of it all of them begin to come back (0: where it would wait for its gradients); None: inside of
    it, one block ahead of the other, which needs least room;
    ``state_shares`` how much of the optimizer's state each device keeps, one whole number a device (ratios between all devices that
    hold the same weights), where the plan shards it; None: 1 each;
    ``offload``: each device keeps the optimizer's state and master weights in the memory of its host, and updates there;
    ``reshard_after_forward``: where parameters are sharded, those of the stage are let go of between its forwards and its backwards, and
    gathered once more; else they stay;
    ``exchange`` and ``overlap`` are only read where a region is not replicated. ``overlap``: each micro-batch runs as two halves in
    turns, so that what one half exchanges is on its way while the other one computes;
    ``hierarchical``: tokens go to their experts once to each host, and from there to its devices (`heterodyne.plan.relays`).
    """

    ops: tuple[Whole, Whole] = (0, 0)
    devices: tuple[str, ...] = ()
    blocks: tuple[Whole, Whole] | None = None
    group: Group | None = None
    regions: tuple[Region, ...]
    recompute: tuple[Whole, ...] = ()
    keep: tuple[str, ...] = ()
    offload_activations: tuple[Whole, ...] = ()
    reload_ahead: Whole | None = None
    state_shares: tuple[Whole, ...] | None = None
    exchange: Exchange = Exchange()
    overlap: bool = False
    hierarchical: bool = False
    offload: bool = False
    reshard_after_forward: bool = True

    @model_validator(mode="after")
    def _said_once(self) -> Self:
        for said, instead in (("devices", "group"), ("ops", "blocks")):
            if getattr(self, instead) is not None and getattr(self, said) != type(self).model_fields[said].default:
                raise ValueError(f"it has '{said}' and '{instead}', which say the same: write one of them")
        return self

    @property
    def sharded(self) -> bool:
        """Return whether devices hold parts of the same tensors, and not just samples of their own."""
        return self._row_width > 1

    @property
    def layout(self) -> Layout:
        """The layout of everything without annotation."""
        return next(region.layout for region in self.regions if region.task_graph == "*")

    @property
    def shares(self) -> tuple[int, ...]:
        """The share of each device in what has no annotation."""
        return self.layout.of_devices

    @property
    def batch_axes(self) -> int:
        """Return how many of the outermost axes replicate every region: their members take samples of their own."""
        of_each = zip(*(region.layout.axes for region in self.regions), strict=False)
        return len(list(takewhile(lambda axes: all(axis.kind == "replicate" for axis in axes), of_each)))

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The devices that work on the same samples, and hold all weights of the stage together."""
        width = self._row_width
        return tuple(self.devices[first : first + width] for first in range(0, len(self.devices), width))

    @property
    def of_row(self) -> Stage:
        """The stage on the devices of its first row alone, which all rows are alike."""
        outer = self.batch_axes
        regions = tuple(region.model_copy(update={"layout": region.layout.within(outer)}) for region in self.regions)
        return self.model_copy(update={"devices": self.devices[: self._row_width], "regions": regions})

    @property
    def _row_width(self) -> int:
        outer = self.batch_axes
        return max((count_of(region.layout.axes[outer:]) for region in self.regions), default=1) or 1

    def row_slices(self, size: int) -> tuple[tuple[int, int], ...]:
        """``(first sample, count)`` for each row, of a micro-batch of ``size`` samples: what its devices work on."""
        return nested_slices(size, self.layout.axes[: self.batch_axes])

    def worked_on(self, size: int) -> tuple[tuple[int, int], ...]:
        """The same for each device."""
        return tuple(own for own in self.row_slices(size) for _ in range(self._row_width))

    def slices(self, size: int) -> tuple[tuple[int, int], ...]:
        """``(first sample, count)`` for each device, of what it receives and sends at the borders of the stage."""
        return nested_slices(size, self.layout.axes)


class Pipeline(PlanPart):
    """A whole copy of the model with its share of the global batch; ``replicas``: so many alike ones, in a plan that is not bound.

    Stages on the same devices share a *place*; places are counted in the order in which the stages first name them. ``order``
    holds, for each place, what its devices compute in which order ("0F0 0F1 0B0 ..."); empty: as the plan's schedule has it.
    """

    micro_batches: Annotated[MicroBatches, BeforeValidator(_micro_batches), PlainSerializer(str, return_type=str)]
    stages: tuple[Stage, ...]
    replicas: Positive = 1
    order: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[tuple[str, ...], ...]:
        """The groups of devices."""
        return tuple(dict.fromkeys(stage.devices for stage in self.stages))

    @property
    def place_of_stage(self) -> tuple[int, ...]:
        places = {devices: number for number, devices in enumerate(self.places)}
        return tuple(places[stage.devices] for stage in self.stages)

    @property
    def groups(self) -> tuple[tuple[Stage, ...], ...]:
        """The stages of each place, in a plan that is not bound: those with the same ``group.place``, else each stage by itself."""
        places: dict[tuple[bool, int], tuple[Stage, ...]] = {}
        for number, stage in enumerate(self.stages):
            if stage.group is not None:
                place = stage.group.place
                key = (True, number) if place is None else (False, place)
                places[key] = (*places.get(key, ()), stage)
        return tuple(places.values())


class Prediction(PlanPart):
    """What the planner expects of one step. None: not known.

    Args:
        efficiency: samples/s over the sum of what the devices reach alone, computing without communicating, each its own share.
        bound_samples_per_s: what all devices of the cluster reach alone, together, in micro-batches that suit each best.
        memory_bytes: the peak of each device; of a plan that names kinds, that of the fullest device and the largest one.
        memory_share: how full the fullest device is, 0 to 1.
        pipelines_s, sync_s, update_s: the parts of ``step_s``: the longest pipeline, exposed seconds of the exchange of gradients and
            parameters after it, the optimizer.
        usd_per_hour: of the devices; usd, joules: of the step, with the traffic.
        traffic: bytes of a step from one host to another, by ``from -> to``.
    """

    step_s: float
    samples_per_s: float
    efficiency: float | None = None
    bound_samples_per_s: float | None = None
    memory_bytes: dict[str, int]
    memory_share: float | None = None
    pipelines_s: float | None = None
    sync_s: float | None = None
    update_s: float | None = None
    usd_per_hour: float | None = None
    usd: float | None = None
    joules: float | None = None
    traffic: dict[str, int] = Field(default_factory=dict)


class Plan(PlanPart):
    """How one model trains on one cluster.

    Args:
        model, cluster: the fingerprints that this plan was made for; "": any that it can be bound to.
        global_batch_size: samples of one optimizer step, over all pipelines.
        precision: that all devices compute in, or that of each kind of device (see `heterodyne.plan.precision`).
        schedule: name of the pipeline schedule, as in PyTorch.
        bucket_bytes: gradients are reduced in buckets of about this size.
        zero: what all devices that hold the same weights share out (ZeRO, Rajbhandari et al., SC 2020): nothing, the state of the
            optimizer, gradients too, parameters too.
        placement: what shares a node when groups are bound: replicas of a stage, or the stages of a pipeline.
        pipelines: who computes what.
        idle: devices that take no part.
        predicted: None for a plan written by hand.
        reason: why the planner chose it, in a sentence.
    """

    version: Literal[2] = PLAN_VERSION
    model: str = ""
    cluster: str = ""
    global_batch_size: Positive
    precision: Precisions = "fp32"
    schedule: str = "1F1B"
    bucket_bytes: Positive = 4 * 2**20
    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_written_as_whole)] = 0
    placement: Literal["stages", "pipelines"] = "stages"
    pipelines: tuple[Pipeline, ...]
    idle: tuple[str, ...] = ()
    predicted: Prediction | None = None
    reason: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that take part, each once, pipeline by pipeline, place by place."""
        return tuple(dict.fromkeys(d for p in self.pipelines for stage in p.stages for d in stage.devices))

    @property
    def device_count(self) -> int:
        """Return how many devices take part, whether they are named or not."""
        asked = (p.replicas * home.group.devices for p in self.pipelines for home, *_ in p.groups if home.group)
        return len(self.devices) + sum(asked)

    @property
    def bound(self) -> bool:
        """Return whether its devices and ops are known. Nothing else runs."""
        return all(
            p.replicas == 1 and all(s.group is None and s.blocks is None for s in p.stages) for p in self.pipelines
        )

    def first_samples(self) -> tuple[int, ...]:
        """For each pipeline the place of its first sample in the global batch."""
        starts, total = [], 0
        for pipeline in self.pipelines:
            starts.append(total)
            total += pipeline.micro_batches.samples
        return tuple(starts)

    def dump(self) -> str:
        """Canonical JSON: ``Plan.parse(plan.dump()) == plan``, and equal plans give equal text."""
        content = self.model_dump(mode="json", exclude_none=True)
        for pipeline in content["pipelines"]:
            _drop(pipeline, {"replicas": 1, "order": []})
            for stage in pipeline["stages"]:
                _drop(stage, _USUAL)
        return readable_json(content) + "\n"

    @classmethod
    @checked_arguments
    def parse(cls, text: str, *, path: str | None = None) -> Plan:
        """Read what `dump` wrote or a person edited. Raises PlanError with every field that is wrong."""
        try:
            content = parse_json(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not JSON: {error.msg} (column {error.colno})", path=path, line=error.lineno) from error
        except ValueError as error:
            raise PlanError(str(error), path=path) from error
        if isinstance(content, dict) and "kind" in content and "pipelines" not in content:
            raise PlanError(
                "this plan on paper is of an older version, or of 'plan --json'; plan again with 'heterodyne plan JOB --cluster FLEET'",
                path=path,
            )
        version = content.get("version") if isinstance(content, dict) else None
        if type(version) is not int or not 1 <= version <= PLAN_VERSION:
            raise PlanError(
                f"plan version {version!r} is not {PLAN_VERSION}; plan again with 'heterodyne plan'", path=path
            )
        # Version 1 had devices by their ids only; what it says means the same.
        try:
            plan = cls.model_validate_json(json.dumps({**content, "version": PLAN_VERSION}))
        except ValidationError as error:
            wrong = [
                f"{'.'.join(map(str, e['loc'])) or 'plan'}: {e['msg'].removeprefix('Value error, ')}"
                for e in error.errors()
            ]
            raise PlanError("; ".join(wrong), path=path) from error
        for number, pipeline in enumerate(plan.pipelines):
            if any(all(region.task_graph != "*" for region in stage.regions) for stage in pipeline.stages):
                raise PlanError(
                    f"pipelines.{number}: a stage has no region '*', which is everything without annotation", path=path
                )
        return plan

    def save(self, path: Path | str) -> None:
        write_text(Path(path), self.dump())

    @classmethod
    @checked_arguments
    def load(cls, path: Path | str) -> Plan:
        """Raises PlanError if the file is not there or not a plan."""
        try:
            text = read_text(path)
        except OSError as error:
            raise PlanError(f"cannot be read: {error.strerror}", path=str(path)) from error
        except UnicodeDecodeError as error:
            raise PlanError("cannot be read: it is not UTF-8 text", path=str(path)) from error
        return cls.parse(text, path=str(path))


_USUAL: Mapping[str, object] = {
    "ops": [0, 0],
    "devices": [],
    "recompute": [],
    "keep": [],
    "offload_activations": [],
    "overlap": False,
    "hierarchical": False,
    "offload": False,
    "reshard_after_forward": True,
    "exchange": Exchange().model_dump(mode="json"),
}


def _drop(content: dict[str, Any], usual: Mapping[str, object]) -> None:
    """Leave out what is as it is where nothing is said."""
    for name, value in usual.items():
        if content.get(name) == value:
            del content[name]
