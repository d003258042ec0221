"""What a plan on paper prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from heterodyne.api.printing import show
from heterodyne.cluster.fleet import Fleet
from heterodyne.report.fleet_tables import changed_rows, fleet_rows, frontier_rows, ranked_rows, stage_rows
from heterodyne.search.fleet.explain import family_in_words, meeting_in_words, step_in_words
from heterodyne.search.fleet.families import Outcome
from heterodyne.search.fleet.planner import FleetPlanner, Planned
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.weighed import Weighed

__all__ = ["show_change", "show_fleet_plan"]


def show_fleet_plan(
    fleet: Fleet,
    planner: FleetPlanner,
    found: Planned,
    *,
    space: Space,
    seq: int | None,
    frontier: bool,
    families: Sequence[Outcome],
) -> None:
    """The fleet, the plan, what comes next, and whatever else was asked for.

    Args:
        space: that was searched.
        seq: tokens of a sample, where samples have some.
        families: what each kind of plan came to, where that was asked for.
    """
    predictor = planner.search(space).predictor
    show(fleet_rows(fleet), stage_rows(planner.fleet, found.best.plan, predictor.expert_width))
    show(ranked_rows(found, seq=seq))
    _say(step_in_words(found))
    apart = meeting_in_words(planner.fleet, found.best.plan)
    if apart:
        _say(apart)
    if frontier:
        show(frontier_rows(found.frontier, seq=seq))
    for outcome in families:
        _say(family_in_words(outcome, found))


def show_change(today: Weighed, then: Weighed, what: str) -> None:
    """A fleet that is not there yet beside the one that is."""
    show(changed_rows(today, then, what))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
