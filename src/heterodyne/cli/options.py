"""Command-line options that several verbs share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from heterodyne.errors import HeterodyneError
from heterodyne.plan.plan import Plan
from heterodyne.run_directory import RunDirectory

__all__ = ["ClusterOption", "JobArgument", "PlanOption", "ProfileOption", "SetOption", "plan_at", "require_place"]

JobArgument = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job: model, data, training, optimizer, ...")]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="cluster.yaml, or cluster.json of a run; without it, the devices of this machine.",
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="PLAN", help="plan.json, or the directory of a run, to obey; without it, measure and plan."
    ),
]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Measurements to plan with, instead of measuring now.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the job; may be repeated."),
]


def require_place(path: Path | None, option: str) -> None:
    """Raise HeterodyneError if no file can be written there, before anything is computed for it."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise HeterodyneError(f"{option} {path}: there is no directory {path.parent}; make it, or write elsewhere")
    if path.is_dir():
        raise HeterodyneError(f"{option} {path}: it is a directory; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise HeterodyneError(f"{option} {path}: it may not be written to; write elsewhere")


def plan_at(path: Path | None) -> Plan | None:
    """The plan in a file, or that of a run directory. Raises PlanError."""
    return None if path is None else Plan.load(RunDirectory(path).plan if path.is_dir() else path)
