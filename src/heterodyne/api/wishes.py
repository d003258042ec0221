"""What somebody asks of a plan on paper."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from heterodyne.cluster.profile import Profile
from heterodyne.search.fleet.objective import Objective

__all__ = ["Wishes"]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What is asked for besides the fastest plan.

    Args:
        add, without, links: a fleet that is not there yet, in the words of `cluster.what_if`; it is compared with the one that is.
        families: whether the best of each kind of plan is searched too, or why there is none.
        framework: who will run the plan, as far as it changes seconds and bytes; None: this library on PyTorch.
        picture: of the frontier.
        export: for ``megatron``, ``torchtitan`` or ``schedule`` (PyTorch's CSV), beside the plan.
        timeline: where the step goes, a rank for each stage: a trace for Perfetto.
        runnable: the model is captured, and only a plan that runs with every op of it is taken.
        profile: measurements of kinds of the fleet; seconds are then theirs, not those of datasheets.
        as_json: print JSON and nothing else.
    """

    objective: Objective = field(default_factory=Objective)
    frontier: bool = False
    add: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    families: bool = False
    framework: str | None = None
    seconds: float | None = None
    picture: Path | None = None
    export: str | None = None
    timeline: Path | None = None
    runnable: bool = False
    profile: Profile | None = None
    as_json: bool = False

    @property
    def for_others(self) -> bool:
        """Whether somebody else than this library will run the plan."""
        return self.framework is not None or self.export is not None

    @property
    def just_a_plan(self) -> bool:
        """Whether nothing is asked for but the fastest plan, of this fleet or of a changed one."""
        return replace(self, add=(), without=(), links=(), as_json=False) == Wishes()

    @property
    def any(self) -> bool:
        """Whether something is asked for that only a plan on paper has; measured plans know of profiles and JSON too."""
        return replace(self, profile=None, as_json=False) != Wishes()
