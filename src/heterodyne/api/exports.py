"""Plans over a fleet in the files of other frameworks, for ``heterodyne plan --export``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from heterodyne.errors import InfeasibleError, PlanError
from heterodyne.plan.export import (
    EvenPlan,
    Precision,
    even_plan_of_groups,
    megatron_arguments,
    pytorch_takes,
    schedule_csv,
    torchtitan_toml,
)
from heterodyne.search.fleet.objective import Objective
from heterodyne.search.fleet.plan import FleetPlan
from heterodyne.search.fleet.planner import FleetPlanner, Planned
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.search.fleet.watch import Watch
from heterodyne.search.fleet.written import written_plan

__all__ = ["Exports"]


@dataclass(frozen=True, kw_only=True)
class Exports:
    """For one framework: ``megatron`` or ``torchtitan``; ``schedule``: for PyTorch itself. ``out``: where the plan is written."""

    framework: str
    planner: FleetPlanner
    precision: Precision
    out: Path

    def plan(self, objective: Objective, *, space: Space, watch: Watch, frontier: bool) -> Planned:
        """The best plan that the framework takes: of all kinds of devices, else of one; else the best of all, which it does not."""
        found = self.planner.plan(objective, space=space, watch=watch, frontier=frontier, accepts=self.takes)
        if self.takes(found.best.plan) or len(self.planner.fleet.kinds) == 1:
            return found
        alone = []
        for kind in self.planner.fleet.kinds:
            pools = tuple(pool.name for pool in self.planner.fleet.pools if pool.kind == kind)
            try:
                own = self.planner.plan(objective, space=replace(space, pools=pools), watch=watch, accepts=self.takes)
            except InfeasibleError:
                continue
            if self.takes(own.best.plan):
                alone.append(own)
        if not alone:
            return found
        best = min(alone, key=lambda own: objective.score(own.best))
        return replace(best, bound_s=found.bound_s, frontier=found.frontier, refused=found.best)

    def refused(self, plan: FleetPlan) -> str:
        """What the framework has no word for; nothing if it takes the plan."""
        try:
            self.files(plan)
        except PlanError as error:
            return str(error)
        return ""

    def takes(self, plan: FleetPlan) -> bool:
        return not self.refused(plan)

    def files(self, plan: FleetPlan) -> dict[Path, str]:
        """And what is in them: for torchtitan also the schedule, where PyTorch does not make it by itself.

        Raises PlanError with what the framework has no word for.
        """
        even = self._even(plan)
        if self.framework == "megatron":
            return {self.out.with_suffix(".megatron.txt"): shlex.join(megatron_arguments(even)) + "\n"}
        csv, toml = self.out.with_suffix(".schedule.csv"), self.out.with_suffix(".torchtitan.toml")
        if self.framework == "schedule":
            return {csv: schedule_csv(even)}
        if pytorch_takes(even):
            return {toml: torchtitan_toml(even)}
        return {toml: torchtitan_toml(even, schedule_csv=str(csv)), csv: schedule_csv(even)}

    def _even(self, plan: FleetPlan) -> EvenPlan:
        experts = max(
            self._predictor.expert_width(group.template, number)
            for group in plan.groups
            for number in range(len(group.template.stages))
        )
        return even_plan_of_groups(
            written_plan(plan, self.planner.fleet), precision=self.precision, expert_width=experts
        )

    @cached_property
    def _predictor(self) -> Predictor:
        return self.planner.search(Space()).predictor
