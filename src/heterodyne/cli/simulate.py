"""``heterodyne simulate``: what would a plan do?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterodyne.cli.options import ClusterOption, ProfileOption, SetOption
from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cluster.written import cluster_from_json
from heterodyne.errors import HeterodyneError
from heterodyne.job import Job
from heterodyne.plan.plan import Plan

__all__ = ["command"]


def command(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, or the directory of a run.")],
    job: Annotated[Path, typer.Option("--job", metavar="JOB.yaml", help="The job whose model the plan is of.")],
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", metavar="NAME|FILE.csv", help="Another schedule: its name, or PyTorch's CSV."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the timeline is written, its trace beside it.")
    ] = Path("timeline.jsonl"),
    overrides: SetOption = None,
) -> int:
    """Play a plan, without running it.

    Print the time of a step, where each device spends it, and the memory it needs at its peak, and write the timeline. Cluster and
    profile are read beside the plan where they lie there, as in the directory of a run; with both, no device is needed.
    """
    # Read before torch is loaded and workers are started, so that a mistake in a file is told at once.
    wanted = Job.load(job, tuple(overrides or ()))
    file = plan / "plan.json" if plan.is_dir() else plan
    given = Plan.load(file)
    described = _cluster(cluster, file.with_name("cluster.json"))
    beside = file.with_name("profile.json")
    known = profile if profile is not None else beside if beside.is_file() else None
    measured = None if known is None else Profile.load(known)
    if not out.parent.is_dir():
        raise HeterodyneError(
            f"--out {out}: there is no directory {out.parent}; make it, or write the timeline elsewhere"
        )
    from heterodyne.api import Simulated, on_every_device, simulate_job

    if described is None or measured is None:
        launched = on_every_device(context.obj, cluster)
        if launched is not None:
            return launched
    asked = Simulated(plan=given, schedule=schedule, cluster=described, profile=measured, out=out)
    return simulate_job(wanted, job.parent, asked, cluster_file=cluster)


def _cluster(given: Path | None, beside: Path) -> Cluster | None:
    """The cluster that is named, or the one beside the plan. Raises ClusterError."""
    if given is not None:
        return load_cluster(given)
    return cluster_from_json(beside.read_text(encoding="utf-8"), path=str(beside)) if beside.is_file() else None
