"""Plans on paper in the files of other frameworks, for ``heterodyne plan --export``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from heterodyne.errors import PlanError
from heterodyne.plan.export import even_plan_of_groups, megatron_arguments, pytorch_takes, schedule_csv, torchtitan_toml
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import Precision

__all__ = ["Exports"]


@dataclass(frozen=True, kw_only=True)
class Exports:
    """For one framework: ``megatron`` or ``torchtitan``; ``schedule``: for PyTorch itself. ``out``: where the plan is written."""

    framework: str
    precision: Precision
    out: Path

    def refused(self, plan: Plan) -> str:
        """What the framework has no word for; nothing if it takes the plan."""
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
