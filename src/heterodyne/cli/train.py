"""``heterodyne train``: the main job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from heterodyne.cli.options import ClusterOption, JobArgument, PlanOption, SetOption, plan_at
from heterodyne.cli.streams import output_may_be_lost
from heterodyne.errors import HeterodyneError, JobError
from heterodyne.job import Job
from heterodyne.secret_names import SECRET_VARIABLE

__all__ = ["command"]


def command(
    job: JobArgument,
    cluster: ClusterOption = None,
    plan: PlanOption = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Where the run is kept; default runs/JOB-N.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --run-dir where it stopped.")] = False,
    replan: Annotated[
        bool, typer.Option("--replan", help="With --resume: measure and plan again, for devices that have changed.")
    ] = False,
    site: Annotated[
        str | None, typer.Option("--site", metavar="NAME", help="Which of the sites of training.sync this is.")
    ] = None,
    overrides: SetOption = None,
) -> int:
    """Train, and leave a report.

    Build, capture, measure, plan and train; on one machine a worker a device is started. A run that is out of memory goes on under
    another plan (training.on_out_of_memory). Ctrl-C ends the step and writes a
    checkpoint (a second one ends at once); with --resume the run goes on from its newest one, bit for bit as if never stopped (a site: from
    where the others are).
    """
    # Read before torch is loaded and workers are started, so that a mistake in a file is reported at once.
    if replan and (not resume or plan is not None):
        raise HeterodyneError(
            "--replan goes with --resume, and without --plan: it measures and plans again what a run goes on under"
        )
    if site is not None:
        if Job.load(job, tuple(overrides or ())).training.sync is None:
            raise JobError(
                f"--site {site}: the job has no sites; write training.sync into it, or leave --site out", path=str(job)
            )
        overrides = [*(overrides or ()), f"training.sync.site={site}"]
    wanted = Job.load(job, tuple(overrides or ()))
    sync = wanted.training.sync
    if sync is not None and sync.site is None:
        raise JobError(f"training.sync: say which of the sites this is: --site {' or --site '.join(sync.shares)}")
    if sync is not None and SECRET_VARIABLE not in os.environ:
        # What workers of this launch know each other by must be known to the other sites, too.
        from heterodyne.runtime.rendezvous.run_secret import secret_of_user

        os.environ[SECRET_VARIABLE] = secret_of_user()
    given = plan_at(plan)
    from heterodyne.api import Training, train_here

    def train(training: Training) -> int:
        from heterodyne.api import train_job

        return train_job(
            wanted,
            wanted.base(job),
            name=job.stem,
            cluster_file=cluster,
            given=given,
            run_dir=training.run_dir,
            resume=training.resume or training.restarted,
            replan=training.replan,
            restarted=training.restarted,
        )

    training = Training(
        job=job,
        cluster=cluster,
        plan=plan,
        run_dir=run_dir,
        resume=resume,
        replan=replan,
        overrides=tuple(overrides or ()),
        on_out_of_memory=wanted.training.on_out_of_memory,
    )
    with output_may_be_lost():
        return train_here(training, train)
