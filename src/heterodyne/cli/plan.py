"""``heterodyne plan``: who should do how much, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterodyne.cli.options import ClusterOption, JobArgument, ProfileOption, SetOption
from heterodyne.cluster.profile import Profile
from heterodyne.errors import HeterodyneError
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
    # Read before torch is loaded and workers are started, so that a mistake in a file is told at once.
    wanted = Job.load(job, tuple(overrides or ()))
    measured = None if profile is None else Profile.load(profile)
    if not out.parent.is_dir():
        raise HeterodyneError(f"--out {out}: there is no directory {out.parent}; make it, or write the plan elsewhere")
    from heterodyne.api import on_every_device, plan_job

    launched = on_every_device(context.obj, cluster)
    if launched is not None:
        return launched
    return plan_job(wanted, job.parent, cluster_file=cluster, profile=measured, out=out)
