"""The wires of a fleet by the names of its pools, looked up once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from heterodyne.cluster.catalog import collectives_of, find
from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.predictor.constants import constants

__all__ = ["Wires", "apart", "collectives"]


@dataclass(frozen=True)
class Wires:
    """Of one fleet."""

    fleet: Fleet
    _known: dict[tuple[str, str], Wire | None] = field(default_factory=dict, repr=False)

    def between(self, a: str, b: str) -> Wire | None:
        """From a node of a pool to one of another (of the same: to another node); None where that is not known.

        Between devices of two libraries of collectives tensors go through the memory of the hosts and through sockets.
        """
        if (a, b) not in self._known:
            wire = self.fleet.wire(self.fleet.pool(a), self.fleet.pool(b))
            if wire is not None and apart(self.fleet, a, b):
                wire = replace(wire, bandwidth_bytes_per_s=constants().stated.sockets * wire.bandwidth_bytes_per_s)
            self._known[a, b] = wire
        return self._known[a, b]

    def inside(self, pool: Pool) -> Wire | None:
        """Where it is not known what joins the devices of a node, what joins nodes is taken."""
        return pool.inside or self.between(pool.name, pool.name)


def collectives(fleet: Fleet, pool: str) -> str:
    """The library by which the devices of a pool exchange tensors; where nothing is known of their kind, that of their backend."""
    own = fleet.pool(pool)
    known = fleet.accelerators.get(own.kind) or find(own.kind)
    return collectives_of(own.backend) if known is None else known.collectives


def apart(fleet: Fleet, a: str, b: str) -> bool:
    """Whether the devices of two pools have no library of collectives in common."""
    return a != b and collectives(fleet, a) != collectives(fleet, b)
