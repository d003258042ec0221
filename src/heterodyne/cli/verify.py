"""``heterodyne verify``: is the plan exact?"""

from __future__ import annotations

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
    overrides: SetOption = None,
    batches: Annotated[
        int,
        typer.Option(
            "--batches", min=1, metavar="N", help="How many batches to compare; in the last one, labels are left out."
        ),
    ] = 3,
) -> int:
    """Compare steps with one device.

    Run steps under the plan and on a single device, with the same weights and the same batches, in fp32; compare the loss and every
    gradient. Where the loss counts labels, the samples of one device have none in the last batch. The exit status is 1 if anything
    differs by more than 1e-5, relatively.
    """
    # Read before torch is loaded and workers are started, so that a mistake in a file is reported at once.
    wanted = Job.load(job, tuple(overrides or ())).here
    given = plan_at(plan)
    from heterodyne.api import on_every_device

    launched = on_every_device(context.obj, cluster)
    if launched is not None:
        return launched
    from heterodyne.api import verify_job

    return verify_job(wanted, wanted.base(job), cluster_file=cluster, given=given, batches=batches)
