"""Which rank holds which parameters and buffers, as the plan has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.plan.boxes import Box, refined
from heterodyne.plan.lower import Lowered
from heterodyne.plan.state_shards import Range

__all__ = ["Ownership"]


@dataclass(kw_only=True)
class Ownership:
    """``owners``: for each parameter and buffer (canonical names) the ranks that hold it, or a box of it, those with samples first.

    What no op reads is held by every rank of the plan. Where each of these holds the whole model, an idle rank holds a copy too,
    which is brought up to date when the state is asked for. ``boxes``: of what is cut, the box of each rank; ``shapes``: of all that.
    ``shards``: of each part of a parameter whose optimizer state is sharded, the elements whose state each rank keeps; ``apart``: and of
    the weight itself too.
    """

    owners: dict[str, tuple[int, ...]]
    active: tuple[int, ...]
    boxes: dict[str, Mapping[int, Box]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shards: Mapping[str, Mapping[Box, Mapping[int, Range]]] = field(default_factory=dict)
    apart: bool = False

    @classmethod
    def of(cls, lowered: Lowered) -> Ownership:
        plan, graph, cluster, holdings = lowered.plan, lowered.graph, lowered.cluster, lowered.weights.holdings
        working = {d for p in plan.pipelines if p.micro_batches.samples for stage in p.stages for d in stage.devices}
        cut = {name: of for name, of in holdings.items() if any(of.values())}
        shards: dict[str, dict[Box, dict[int, Range]]] = {}
        for bucket in lowered.weights.sharded.values():
            for own in bucket.slices:
                of = shards.setdefault(own.part.name, {}).setdefault(own.part.box, {})
                of[cluster.rank(own.owner)] = (own.start, own.stop)
        return cls(
            shards=shards,
            apart=plan.zero > 2,
            owners={
                name: tuple(sorted(map(cluster.rank, devices), key=lambda r: (cluster.devices[r].id not in working, r)))
                for name, devices in holdings.items()
            },
            active=tuple(sorted(map(cluster.rank, plan.devices))),
            boxes={name: {cluster.rank(device): box for device, box in of.items()} for name, of in cut.items()},
            shapes={stored.name: stored.shape for stored in (*graph.parameters, *graph.buffers)},
        )

    def __post_init__(self) -> None:
        self._planned = (dict(self.owners), dict(self.boxes), dict(self.shapes))

    def fit(self, name: str, shape: tuple[int, ...]) -> None:
        """Let a buffer have this shape now. One that the plan does not know, or of another shape, is held whole by each rank of it."""
        owners, boxes, shapes = self._planned
        self.shapes[name] = shape
        self.boxes.pop(name, None)
        if shapes.get(name) != shape:
            self.owners[name] = self.active
            return
        self.owners[name] = owners[name]
        if name in boxes:
            self.boxes[name] = boxes[name]

    @cached_property
    def whole(self) -> bool:
        """Every rank of the plan holds everything, and updates it."""
        return (
            not self.boxes and not self.shards and all(len(ranks) == len(self.active) for ranks in self.owners.values())
        )

    def holds(self, rank: int, name: str) -> bool:
        return self.whole or rank in self.owners[name]

    def holders(self, name: str, ranks: Iterable[int]) -> dict[int, Box]:
        """Those of the ranks that hold it, each with what it holds."""
        return {rank: self.box(rank, name) for rank in ranks if self.holds(rank, name)}

    def box(self, rank: int, name: str) -> Box:
        """What of it a rank holds; () is all of it."""
        return self.boxes.get(name, {}).get(rank, ())

    def updated(self, rank: int, name: str) -> Range | None:
        """Of what a rank holds of it, the elements that it updates; None: all of them."""
        if name not in self.shards:
            return None
        return next((ranges[rank] for ranges in self.shards[name].values() if rank in ranges), (0, 0))

    def keeper(self, name: str) -> int:
        """Return the rank whose value counts and that writes it into a checkpoint; what is in pieces has a rank for each piece.

        Of weights whose state alone is sharded it is now this owner, now that, so that all have as much to write.
        """
        owners = self.owners[name]
        return owners[self._place[name] % len(owners)] if name in self._place else owners[0]

    @cached_property
    def _place(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.shards)}

    def parts(self, name: str) -> list[tuple[Box, int]]:
        """The boxes that together are all of it, each once, with the rank whose values count."""
        if name not in self.boxes:
            return [((), self.owners[name][0])]
        held = {rank: self.boxes[name].get(rank, ()) for rank in self.owners[name]}
        return [(box, of[0]) for box, of in refined(held, self.shapes[name])]
