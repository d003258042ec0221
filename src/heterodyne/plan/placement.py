"""Where each rank stands in a plan: which stages it holds, and which samples of the global batch are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from heterodyne.cluster.spec import Cluster
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Plan, Stage
from heterodyne.plan.precision import Precision, precision_of, together

__all__ = ["Placement", "RankRole"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRole:
    """One rank. ``pipeline``: its number, None for an idle rank.

    Args:
        stages: those that it holds.
        last: whether the last one, which makes the loss, is among them.
        first_sample, micro_batches: of its pipeline in the global batch.
        held: the same stages as the plan has them.
        position: among the devices of each of them.
        precision: that it computes in.
        sharded: those of its sharded stages on devices which work on the same samples.
    """

    rank: int
    device: str
    pipeline: int | None = None
    stages: tuple[int, ...] = ()
    last: bool = False
    first_sample: int = 0
    micro_batches: MicroBatches = field(default_factory=MicroBatches)
    held: tuple[Stage, ...] = ()
    position: int = 0
    sharded: frozenset[int] = frozenset()
    precision: Precision = "fp32"

    @property
    def answers(self) -> bool:
        """Return whether it tells what the samples of its last stage count, which the other devices of its row would tell again."""
        return not (self.last and self.position % len(self.held[-1].rows[0]))

    @property
    def active(self) -> bool:
        """It is in a pipeline, perhaps without samples; an idle rank holds no up-to-date weights."""
        return self.pipeline is not None

    def spans(self, stage: int | None = None) -> tuple[tuple[int, int], ...]:
        """``(first sample in the global batch, count)`` of what it works on of each micro-batch on a stage; None: on its last stage."""
        return self.spans_of(self.first_sample, self.micro_batches.sizes, stage)

    def spans_of(self, first: int, sizes: Sequence[int], stage: int | None = None) -> tuple[tuple[int, int], ...]:
        """The same for micro-batches of other sizes, from sample ``first`` on."""
        if not self.stages:
            return ()
        held = self.held[-1 if stage is None else self.stages.index(stage)]
        of_size = {size: held.worked_on(size)[self.position] for size in set(sizes)}
        taken = [of_size[size] for size in sizes]
        offsets = accumulate(sizes, initial=first)
        return tuple((offset + start, count) for offset, (start, count) in zip(offsets, taken, strict=False))


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All ranks, in order."""

    places: tuple[RankRole, ...]

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster) -> Placement:
        places = {
            device.id: RankRole(rank=rank, device=device.id, precision=precision_of(plan.precision, device.kind))
            for rank, device in enumerate(cluster.devices)
        }
        for number, (first, pipeline) in enumerate(zip(plan.first_samples(), plan.pipelines, strict=True)):
            for devices in pipeline.places:
                held = [stage for stage, of in enumerate(pipeline.stages) if of.devices == devices]
                of_each = [precision_of(plan.precision, cluster.device(device).kind) for device in devices]
                width = max(len(pipeline.stages[stage].rows[0]) for stage in held)
                for position, device in enumerate(devices):
                    places[device] = RankRole(
                        rank=cluster.rank(device),
                        device=device,
                        pipeline=number,
                        stages=tuple(held),
                        precision=together(of_each[position // width * width :][:width]),
                        last=held[-1] == len(pipeline.stages) - 1,
                        first_sample=first,
                        micro_batches=pipeline.micro_batches,
                        held=tuple(pipeline.stages[stage] for stage in held),
                        position=position,
                        sharded=frozenset(stage for stage in held if pipeline.stages[stage].sharded),
                    )
        return cls(places=tuple(places[device.id] for device in cluster.devices))

    @property
    def active(self) -> tuple[int, ...]:
        """The ranks that hold up-to-date weights and reduce gradients."""
        return tuple(role.rank for role in self.places if role.active)

    @property
    def sharing(self) -> tuple[int, ...]:
        """The ranks that have samples."""
        return tuple(role.rank for role in self.places if role.micro_batches.samples)

    @property
    def leader(self) -> int:
        """The lowest rank with samples: where each rank has the whole model, its weights and buffers are those that are kept."""
        return self.sharing[0]

    def micro_steps(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each j the spans of the j-th micro-batches of all pipelines, in order of the samples: what is one batch to BatchNorm."""
        spans = [role.spans() for role in self.places if role.last and role.answers]
        count = max(len(own) for own in spans)
        return tuple(tuple(sorted(own[j] for own in spans if j < len(own) and own[j][1])) for j in range(count))
