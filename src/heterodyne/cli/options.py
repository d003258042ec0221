"""The options that several verbs share, told once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ClusterOption", "JobArgument", "PlanOption", "ProfileOption", "SetOption"]

JobArgument = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job: model, data, training, optimizer, ...")]
ClusterOption = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", help="cluster.yaml; without it, the devices of this machine."),
]
PlanOption = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE", help="plan.json to obey; without it, measure and plan.")
]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Measurements to plan with, instead of measuring now.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the job; may be repeated."),
]
