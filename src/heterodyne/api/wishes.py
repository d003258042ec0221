"""What somebody asks of a plan on paper."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

from heterodyne.cluster.profile import Profile
from heterodyne.errors import PlanError
from heterodyne.plan.export import even_plan_of_groups, megatron_arguments, pytorch_takes, schedule_csv, torchtitan_toml
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import Precision
from heterodyne.search.fleet.objective import Objective

__all__ = ["Exports", "Wishes"]


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
        sites: whether ways over the sites of the fleet are compared, in the place of a plan.
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
    sites: bool = False
    runnable: bool = False
    profile: Profile | None = None
    as_json: bool = False

    @property
    def for_others(self) -> bool:
        """Return whether somebody else than this library will run the plan."""
        return self.framework is not None or self.export is not None

    @property
    def just_a_plan(self) -> bool:
        """Return whether nothing is asked for but the fastest plan, of this fleet or of a changed one."""
        return replace(self, add=(), without=(), links=(), as_json=False) == Wishes()

    @property
    def any(self) -> bool:
        """Return whether something is asked for that only a plan on paper has; measured plans know of profiles and JSON too."""
        return replace(self, profile=None, as_json=False) != Wishes()


@dataclass(frozen=True, kw_only=True)
class Exports:
    """For one framework: ``megatron`` or ``torchtitan``; ``schedule``: for PyTorch itself. ``out``: where the plan is written."""

    framework: str
    precision: Precision
    out: Path

    def refused(self, plan: Plan) -> str:
        """Return what the framework has no word for; nothing if it takes the plan."""
        try:
            self.files(plan)
        except PlanError as error:
            return str(error)
        return ""

    def takes(self, plan: Plan) -> bool:
        return not self.refused(plan)

    def files(self, plan: Plan) -> dict[Path, str]:
        """And what is in them: for torchtitan also the schedule, where PyTorch does not make it by itself.

        Raises PlanError with what the framework has no word for.
        """
        even = even_plan_of_groups(plan, precision=self.precision)
        if self.framework == "megatron":
            return {self.out.with_suffix(".megatron.txt"): shlex.join(megatron_arguments(even)) + "\n"}
        csv, toml = self.out.with_suffix(".schedule.csv"), self.out.with_suffix(".torchtitan.toml")
        if self.framework == "schedule":
            return {csv: schedule_csv(even)}
        if pytorch_takes(even):
            return {toml: torchtitan_toml(even)}
        return {toml: torchtitan_toml(even, schedule_csv=str(csv)), csv: schedule_csv(even)}
