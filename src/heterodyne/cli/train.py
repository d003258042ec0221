"""``heterodyne train``: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterodyne.cli.options import ClusterOption, JobArgument, PlanOption, SetOption, plan_at
from heterodyne.job import Job

__all__ = ["command"]


def command(
    context: typer.Context,
    job: JobArgument,
    cluster: ClusterOption = None,
    plan: PlanOption = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Where the run is kept; default runs/JOB-N.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir where it stopped.")] = False,
    overrides: SetOption = None,
) -> int:
    """Train, and leave a report.

    Build, capture, measure, plan and train; on one machine a worker a device is started. Ctrl-C ends the step and writes a
    checkpoint; with --resume the run goes on from its newest one, bit for bit as if never stopped.
    """
    # Read before torch is loaded and workers are started, so that a mistake in a file is told at once.
    wanted = Job.load(job, tuple(overrides or ()))
    given = plan_at(plan)
    from heterodyne.api import on_every_device

    launched = on_every_device(context.obj, cluster)
    if launched is not None:
        return launched
    from heterodyne.api import train_job

    return train_job(
        wanted, wanted.base(job), name=job.stem, cluster_file=cluster, given=given, run_dir=run_dir, resume=resume
    )
