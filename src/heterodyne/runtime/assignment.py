"""What a rank is asked to do: a plan, lowered, and its place among the others."""

from __future__ import annotations

from dataclasses import dataclass

from heterodyne.plan.lower import Lowered
from heterodyne.plan.placement import RankRole
from heterodyne.plan.program import Action
from heterodyne.runtime.comm.communicator import Communicator

__all__ = ["Assignment"]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The parts of a rank's runtime are made from it. ``communicator``: of this rank."""

    lowered: Lowered
    communicator: Communicator

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def role(self) -> RankRole:
        return self.lowered.placement.places[self.rank]

    @property
    def actions(self) -> tuple[Action, ...]:
        return self.lowered.program.ranks[self.rank]
