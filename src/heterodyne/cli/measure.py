"""``heterodyne measure``: how fast is what is here, for this model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterodyne.cli.options import ClusterOption, JobArgument, SetOption, require_place
from heterodyne.job import Job

__all__ = ["command"]


def command(
    context: typer.Context,
    job: JobArgument,
    cluster: ClusterOption = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the profile here.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure even if the cache has it.")] = False,
    overrides: SetOption = None,
) -> int:
    """Time the model on each device.

    Each distinct block of it, forward and backward, at several micro-batch sizes, and the links between the devices.
    """
    # Read before torch is loaded and workers are started, so that a mistake in a file is reported at once.
    wanted = Job.load(job, tuple(overrides or ())).here
    require_place(out, "--out")
    from heterodyne.api import on_every_device

    launched = on_every_device(context.obj, cluster)
    if launched is not None:
        return launched
    from heterodyne.api import measure_job

    return measure_job(wanted, wanted.base(job), cluster_file=cluster, out=out, fresh=fresh)
