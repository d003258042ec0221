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
from heterodyne.text_files import read_text

__all__ = ["command"]


def command(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, or the directory of a run.")],
    job: Annotated[
        Path | None,
        typer.Option(
            "--job", metavar="JOB.yaml", help="The job whose model the plan is of; that of the run by default."
        ),
    ] = None,
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

    Print the time of a step, where each device spends it, and the memory it needs at its peak, and write the timeline. In the directory
    of a run, its job, its cluster and its profile are taken where no others are named; with these known, no device is needed.
    """
    # Read before torch is loaded and workers are started, so that a mistake in a file is reported at once.
    file = plan / "plan.json" if plan.is_dir() else plan
    given = Plan.load(file)
    job = job or _job_beside(file)
    wanted = Job.load(job, tuple(overrides or ()))
    described, measured = _known(file.parent, cluster, profile)
    if not out.parent.is_dir():
        raise HeterodyneError(
            f"--out {out}: there is no directory {out.parent}; make it, or write the timeline elsewhere"
        )
    from heterodyne.api import on_every_device

    if described is None or measured is None:
        launched = on_every_device(context.obj, cluster)
        if launched is not None:
            return launched
    from heterodyne.api import Simulated, simulate_job

    asked = Simulated(plan=given, schedule=schedule, cluster=described, profile=measured, out=out)
    return simulate_job(wanted, wanted.base(job), asked, cluster_file=cluster)


def _job_beside(plan: Path) -> Path:
    """The job that a run keeps with its plan. Raises HeterodyneError where there is none."""
    kept = plan.with_name("job.yaml")
    if not kept.is_file():
        raise HeterodyneError(
            f"{plan} is a plan without its model, and no job.yaml lies beside it: name the job with --job JOB.yaml"
        )
    return kept


def _known(folder: Path, cluster: Path | None, profile: Path | None) -> tuple[Cluster | None, Profile | None]:
    """What is named; else what is kept in the folder, if it is that of a run, which keeps both. Raises ClusterError or MeasureError."""
    kept = folder / "cluster.json", folder / "profile.json"
    of_run = all(path.is_file() for path in kept)
    described = load_cluster(cluster) if cluster is not None else None
    if described is None and of_run:
        described = cluster_from_json(read_text(kept[0]), path=str(kept[0]))
    if profile is None and of_run:
        profile = kept[1]
    return described, None if profile is None else Profile.load(profile)
