"""The wires of a fleet by the names of its pools, looked up once."""

from __future__ import annotations

from dataclasses import dataclass, field

from heterodyne.cluster.fleet import Fleet, Pool, Wire

__all__ = ["Wires"]


@dataclass(frozen=True)
class Wires:
    """Of one fleet."""

    fleet: Fleet
    _known: dict[tuple[str, str], Wire | None] = field(default_factory=dict, repr=False)

    def between(self, a: str, b: str) -> Wire | None:
        """From a node of a pool to one of another (of the same: to another node); None where that is not known."""
        if (a, b) not in self._known:
            self._known[a, b] = self.fleet.wire(self.fleet.pool(a), self.fleet.pool(b))
        return self._known[a, b]

    def inside(self, pool: Pool) -> Wire | None:
        """Where it is not known what joins the devices of a node, what joins nodes is taken."""
        return pool.inside or self.between(pool.name, pool.name)
