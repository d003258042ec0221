"""``heterodyne plan``: who should do how much, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterodyne.cli.options import ClusterOption, JobArgument, ProfileOption, SetOption
from heterodyne.job import Job

__all__ = ["command"]


def command(
    context: typer.Context,
    job: JobArgument,
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the plan is written.")] = Path("plan.json"),
    overrides: SetOption = None,
) -> int:
    """Choose who does how much, and say why.

    Measure (or read a profile), weigh the plans, print the choice with its reasons, and write it.
    """
    wanted = Job.load(
        job, tuple(overrides or ())
    )  # before torch is loaded and workers are started: a mistake in it is told at once
    from heterodyne.api import on_every_device, plan_job

    launched = on_every_device(context.obj, cluster)
    if launched is not None:
        return launched
    return plan_job(wanted, job.parent, cluster_file=cluster, profile_file=profile, out=out)
