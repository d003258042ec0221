"""Point-to-point messages between the stages of a pipeline: ranks, bytes, links and seconds.

A value that crosses a cut goes straight from the stage that makes it to each stage that reads it; its gradient goes the same way back. A
device of a stage with several devices has a slice of each micro-batch, and sends each device of the other stage the overlap of their
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from heterodyne.cluster.spec import Cluster
from heterodyne.cost.collective import FREE, AlphaBeta, Collectives
from heterodyne.graph.cut import Crossing
from heterodyne.graph.size import Size
from heterodyne.plan.slices import overlap

__all__ = ["Route", "link_between", "routes"]

Slices = Sequence[tuple[int, int]]
"""``(first sample, count)`` of each micro-batch, of one device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Messages from one stage on one rank to another stage on another rank, one per micro-batch.

    Args:
        kind: ``F`` for values (SEND_F to RECV_F), ``B`` for their gradients (SEND_B to RECV_B).
        source, destination: ``(rank, stage)``, stages counted within their pipeline.
        link: transfers over links of one name are serialised.
        bytes: per micro-batch; 0 where nothing is sent.
        latency_s: seconds of a message that do not occupy the link.
        seconds: per micro-batch: how long it occupies the link.
        source_s, destination_s: per micro-batch: compute seconds of either rank. Empty: none.
    """

    kind: Literal["F", "B"]
    source: tuple[int, int]
    destination: tuple[int, int]
    link: str
    bytes: tuple[int, ...]
    latency_s: float
    seconds: tuple[float, ...]
    source_s: tuple[float, ...] = ()
    destination_s: tuple[float, ...] = ()

    def repeated(self, batches: int) -> Route:
        """Return the messages of so many batches, one behind the other."""
        return replace(
            self,
            bytes=self.bytes * batches,
            seconds=self.seconds * batches,
            source_s=self.source_s * batches,
            destination_s=self.destination_s * batches,
        )


def link_between(cluster: Cluster, source: str, destination: str) -> str:
    """The name of the link from one device to another: that of their nodes where the cluster knows of one, else their own.

    Each direction is a link. Devices of one node are taken to be joined pair by pair.
    """
    a, b = cluster.device(source).node, cluster.device(destination).node
    if a != b and cluster.link(source, destination) is not None:
        return f"{a} -> {b}"
    return f"{source} -> {destination}"


def routes(
    crossings: Iterable[Crossing],
    stages: Sequence[Mapping[str, Slices]],
    cluster: Cluster,
    collectives: Collectives,
    narrow: Callable[[str, str], bool] = lambda _, __: False,
) -> tuple[Route, ...]:
    """All routes of a pipeline; ``stages``: for each stage its devices with their slices of the micro-batches; ``narrow``: whether two
    devices send each other activations in 16 bits.

    Raises MeasureError if nothing is known of a link that is used.
    """
    values: dict[tuple[int, int], list[Crossing]] = {}
    gradients: dict[tuple[int, int], list[Crossing]] = {}
    for crossing in crossings:
        for consumer in crossing.consumers:
            values.setdefault((crossing.producer, consumer), []).append(crossing)
            if crossing.differentiable:
                gradients.setdefault((consumer, crossing.producer), []).append(crossing)
    made = []
    flows: tuple[tuple[Literal["F", "B"], dict[tuple[int, int], list[Crossing]]], ...] = (
        ("F", values),
        ("B", gradients),
    )
    for kind, flow in flows:
        for (source, destination), sent in flow.items():
            wide, short = Size.total(c.bytes for c in sent), Size.total(c.narrow_bytes for c in sent)
            for a, own in stages[source].items():
                for b, other in stages[destination].items():
                    common = [overlap(x, y)[1] for x, y in zip(own, other, strict=True)]
                    if a != b and any(common):
                        ends = (cluster.rank(a), source), (cluster.rank(b), destination)
                        lane = link_between(cluster, a, b)
                        size = short if narrow(a, b) else wide
                        busy = collectives.busy(a, b), collectives.busy(b, a)
                        made.append(_route(kind, ends, lane, size, common, collectives.send(a, b), busy))
    return tuple(made)


def _route(
    kind: Literal["F", "B"],
    ends: tuple[tuple[int, int], tuple[int, int]],
    link: str,
    size: Size,
    common: Sequence[int],
    cost: AlphaBeta,
    busy: tuple[AlphaBeta, AlphaBeta],
) -> Route:
    of_count = {count: round(size(count)) if count else 0 for count in set(common)}
    source_s, destination_s = (
        tuple(own(of_count[count]) if count else 0.0 for count in common) if own != FREE else () for own in busy
    )
    return Route(
        kind=kind,
        source=ends[0],
        destination=ends[1],
        link=link,
        bytes=tuple(of_count[count] for count in common),
        latency_s=cost.latency_s,
        seconds=tuple(cost.s_per_byte * of_count[count] for count in common),
        source_s=source_s,
        destination_s=destination_s,
    )
