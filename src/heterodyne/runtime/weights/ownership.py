"""Which rank holds which parameters and buffers, as the plan has it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.cluster.spec import Cluster
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.boxes import Box, refined
from heterodyne.plan.buckets import holdings_of
from heterodyne.plan.plan import Plan

__all__ = ["Ownership"]


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """``owners``: for each parameter and buffer (canonical names) the ranks that hold it, or a box of it, those with samples first.

    What no op reads is held by every rank of the plan. Where each of these holds the whole model, an idle rank holds a copy too,
    which is brought up to date when the state is asked for. ``boxes``: of what is cut, the box of each rank; ``shapes``: of all that.
    """

    owners: Mapping[str, tuple[int, ...]]
    active: tuple[int, ...]
    boxes: Mapping[str, Mapping[int, Box]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, graph: ModelGraph, cluster: Cluster) -> Ownership:
        working = {d for p in plan.pipelines if p.micro_batches.samples for stage in p.stages for d in stage.devices}
        holdings = holdings_of(plan, graph)
        cut = {name: of for name, of in holdings.items() if any(of.values())}
        return cls(
            owners={
                name: tuple(sorted(map(cluster.rank, devices), key=lambda r: (cluster.devices[r].id not in working, r)))
                for name, devices in holdings.items()
            },
            active=tuple(sorted(map(cluster.rank, plan.devices))),
            boxes={name: {cluster.rank(device): box for device, box in of.items()} for name, of in cut.items()},
            shapes={stored.name: stored.shape for stored in (*graph.parameters, *graph.buffers)},
        )

    @cached_property
    def whole(self) -> bool:
        """Every rank of the plan holds everything."""
        return not self.boxes and all(len(ranks) == len(self.active) for ranks in self.owners.values())

    def holds(self, rank: int, name: str) -> bool:
        return self.whole or rank in self.owners[name]

    def holders(self, name: str, ranks: Iterable[int]) -> dict[int, Box]:
        """Those of the ranks that hold it, each with what it holds."""
        return {rank: self.box(rank, name) for rank in ranks if self.holds(rank, name)}

    def box(self, rank: int, name: str) -> Box:
        """What of it a rank holds; () is all of it."""
        return self.boxes.get(name, {}).get(rank, ())

    def keeper(self, name: str) -> int:
        """The rank whose value counts; of what is cut, the one that brings it together for a checkpoint, which is now this, now that."""
        owners = self.owners[name]
        return owners[self._place[name] % len(owners)] if name in self.boxes else owners[0]

    @cached_property
    def _place(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.boxes)}

    def parts(self, name: str) -> list[tuple[Box, int]]:
        """The boxes that together are all of it, each once, with the rank whose values count."""
        if name not in self.boxes:
            return [((), self.owners[name][0])]
        held = {rank: self.boxes[name].get(rank, ()) for rank in self.owners[name]}
        return [(box, of[0]) for box, of in refined(held, self.shapes[name])]
