"""The wires of a fleet, looked up by pool names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from heterodyne.cluster.catalog import library_of
from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.predictor.constants import constants
from heterodyne.search.fleet.arrays import Floats

__all__ = ["Wires", "apart", "collectives"]


@dataclass(frozen=True)
class Wires:
    """Of one fleet."""

    fleet: Fleet
    _known: dict[tuple[str, str], Wire | None] = field(default_factory=dict, repr=False)

    def between(self, a: str, b: str) -> Wire | None:
        """From a node of a pool to one of another (of the same: to another node); None where unknown.

        Tensors between devices without a common collectives library go through host memory and sockets.
        """
        if (a, b) not in self._known:
            wire = self.fleet.wire(self.fleet.pool(a), self.fleet.pool(b))
            if wire is not None and apart(self.fleet, a, b):
                wire = replace(wire, bandwidth_bytes_per_s=constants().stated.sockets * wire.bandwidth_bytes_per_s)
            self._known[a, b] = wire
        return self._known[a, b]

    @property
    def byte_s(self) -> Floats:
        """Seconds of a byte from a node of each pool to another one of it; 0 where that is not known."""
        wires = [self.between(pool.name, pool.name) for pool in self.fleet.pools]
        return np.array([0.0 if wire is None else 1 / wire.bandwidth_bytes_per_s for wire in wires])

    def inside(self, pool: Pool) -> Wire | None:
        """The link inside a node; where it is unknown, the link between nodes."""
        return pool.inside or self.between(pool.name, pool.name)


def collectives(fleet: Fleet, pool: str) -> str:
    """The collectives library of a pool's devices; where nothing is known of their kind, that of their backend."""
    own = fleet.pool(pool)
    stated = fleet.accelerators.get(own.kind)
    return library_of(own.kind, own.backend) if stated is None else stated.collectives


def apart(fleet: Fleet, a: str, b: str) -> bool:
    """Whether the devices of two pools have no common collectives library."""
    return a != b and collectives(fleet, a) != collectives(fleet, b)
