"""What a pipeline schedule is: a name, where it puts the stages, and a pure function that makes the orders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from heterodyne.errors import PlanError
from heterodyne.plan.program import Action
from heterodyne.units import counted

__all__ = ["Orders", "Schedule", "action", "stage_places"]

Orders: TypeAlias = tuple[tuple[Action, ...], ...]
"""For each place of a pipeline its F, B, I, W and R actions, in order."""

Placement: TypeAlias = Literal["loop", "v"]

action = lru_cache(maxsize=1 << 16)(Action)
"""An action as `Action` makes it, made once: orders of many shapes have the same ones again and again."""


def stage_places(placement: Placement, places: int, chunks: int) -> tuple[int, ...]:
    """The place of each of ``places * chunks`` stages.

    ``loop``: stage s is on place s mod p. ``v``: down the places and back again, so that neighbours at the turn share a place.
    """
    down = range(places)
    return tuple(
        place for chunk in range(chunks) for place in (reversed(down) if placement == "v" and chunk % 2 else down)
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A named way to order the work of a pipeline, for any number of micro-batches.

    Args:
        placement: which places the stages are on (see `stage_places`).
        chunks: the stages that it wants on each place; None: any number.
        make: from places, chunks and micro-batches (all of them at least 1) to the orders. Read `orders` instead.
        all_at_once: every micro-batch runs forward before any runs backward, even where there is one stage only.
        halves: the two halves of a backward, I and W, run apart.
        asynchronous: batches follow each other without a flush, so that some forwards run before the update of the batch before them.
    """

    name: str
    placement: Placement
    chunks: int | None
    make: Callable[[int, int, int], Orders]
    all_at_once: bool = False
    halves: bool = False
    asynchronous: bool = False

    def orders(self, places: int, chunks: int, micro_batches: int) -> Orders:
        """Return what each place computes, in order. Raises PlanError if the schedule is not for so many stages a place.

        One stage on one place has nothing to wait for and nobody waits for it, so there the backward follows its forward at once.
        """
        if places < 1 or chunks < 1 or micro_batches < 0:
            raise PlanError(
                f"{self.name} needs at least one place, one stage on each and no negative number of micro-batches "
                f"(it got {places} places, {chunks} stages on each, {micro_batches} micro-batches)"
            )
        if self.chunks is not None and chunks != self.chunks:
            shape = "in V order, " if self.placement == "v" else ""
            raise PlanError(
                f"{self.name} needs {counted(self.chunks, 'stage')} on each place, {shape}not {chunks}: "
                f"cut the model into {self.chunks * places} stages for {places} places, or choose another schedule"
            )
        if micro_batches == 0:
            return ((),) * places
        if places * chunks == 1 and not self.all_at_once:
            return (tuple(Action(0, kind, index) for index in range(micro_batches) for kind in ("F", "B")),)
        return self.make(places, chunks, micro_batches)

    def stage_places(self, places: int, chunks: int) -> tuple[int, ...]:
        """The place of each stage."""
        return stage_places(self.placement, places, chunks)
