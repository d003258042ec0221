"""``heterodyne verify``: is the plan exact?"""

from __future__ import annotations

import typer

from heterodyne.cli.options import ClusterOption, JobArgument, PlanOption, SetOption
from heterodyne.job import Job
from heterodyne.plan.plan import Plan

__all__ = ["command"]


def command(
    context: typer.Context,
    job: JobArgument,
    cluster: ClusterOption = None,
    plan: PlanOption = None,
    overrides: SetOption = None,
) -> int:
    """Compare a step with one device.

    Run one step under the plan and one on a single device, with the same weights and the same batch, in fp32; compare the loss
    and every gradient. The exit status is 1 if any differs by more than 1e-5, relatively.
    """
    # Read before torch is loaded and workers are started, so that a mistake in a file is told at once.
    wanted = Job.load(job, tuple(overrides or ()))
    given = None if plan is None else Plan.load(plan)
    from heterodyne.api import on_every_device, verify_job

    launched = on_every_device(context.obj, cluster)
    if launched is not None:
        return launched
    return verify_job(wanted, job.parent, cluster_file=cluster, given=given)
