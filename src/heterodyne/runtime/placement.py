"""Where each rank stands in a plan: which samples of the global batch are its own."""

from __future__ import annotations

from dataclasses import dataclass, field

from heterodyne.cluster.spec import Cluster
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Plan

__all__ = ["Place", "Placement"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank. ``active``: it is in a pipeline (perhaps without samples); an idle rank holds no up-to-date weights."""

    rank: int
    device: str
    active: bool
    first_sample: int = 0
    micro_batches: MicroBatches = field(default_factory=MicroBatches)

    def spans(self) -> tuple[tuple[int, int], ...]:
        """``(first sample in the global batch, size)`` of each micro-batch."""
        return tuple((self.first_sample + offset, size) for offset, size in self.micro_batches.offsets())


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All ranks, in order."""

    places: tuple[Place, ...]

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster) -> Placement:
        """For plans with one device a pipeline, as `plan.check` demands of them."""
        pipelines = {
            pipeline.stages[0].devices[0]: (first, pipeline.micro_batches)
            for first, pipeline in zip(plan.first_samples(), plan.pipelines, strict=True)
        }
        places = []
        for rank, device in enumerate(cluster.devices):
            if device.id in pipelines:
                first, micro_batches = pipelines[device.id]
                places.append(
                    Place(rank=rank, device=device.id, active=True, first_sample=first, micro_batches=micro_batches)
                )
            else:
                places.append(Place(rank=rank, device=device.id, active=False))
        return cls(places=tuple(places))

    @property
    def active(self) -> tuple[int, ...]:
        """The ranks that hold up-to-date weights and reduce gradients."""
        return tuple(place.rank for place in self.places if place.active)

    @property
    def sharing(self) -> tuple[int, ...]:
        """The ranks that have samples."""
        return tuple(place.rank for place in self.places if place.micro_batches.samples)

    @property
    def leader(self) -> int:
        """The lowest rank with samples: its weights and buffers are those that are kept."""
        return self.sharing[0]

    def micro_steps(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each j the spans of the j-th micro-batches of all ranks, in order of the samples: what is one batch to BatchNorm."""
        spans = [place.spans() for place in self.places]
        count = max(len(own) for own in spans)
        return tuple(tuple(sorted(own[j] for own in spans if j < len(own))) for j in range(count))
