"""``heterodyne simulate``: what would a plan do?"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from heterodyne.cli.options import ClusterOption, ProfileOption, SetOption, require_place
from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cluster.written import cluster_from_json
from heterodyne.errors import HeterodyneError
from heterodyne.job import Job
from heterodyne.plan.plan import Plan
from heterodyne.printable import printable
from heterodyne.run_directory import RunDirectory
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
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the code that the job of somebody else's run names, without asking.")
    ] = False,
) -> int:
    """Play a plan, without running it.

    Print the time of a step, where each device spends it, and the memory it needs at its peak, and write the timeline. In the directory
    of a run, its job, its cluster and its profile are taken where no others are named; with these known, no device is needed. Before code
    runs that the run of somebody else names, you are asked.
    """
    # Read before torch is loaded and workers are started, so that a mistake in a file is reported at once.
    file = RunDirectory(plan).plan if plan.is_dir() else plan
    given = Plan.load(file)
    named = job is not None
    job = job or _job_beside(file)
    wanted = Job.load(job, tuple(overrides or ())).here
    if not (named or trust):
        _require_trust(job, wanted)
    described, measured = _known(file.parent, cluster, profile)
    require_place(out, "--out")
    from heterodyne.api import on_every_device

    if described is None or measured is None:
        launched = on_every_device([*context.obj, "--trust"], cluster)  # asked once
        if launched is not None:
            return launched
    from heterodyne.api import Simulated, simulate_job

    asked = Simulated(plan=given, schedule=schedule, cluster=described, profile=measured, out=out)
    return simulate_job(wanted, wanted.base(job), asked, cluster_file=cluster)


def _job_beside(plan: Path) -> Path:
    """The job that a run keeps with its plan. Raises HeterodyneError where there is none."""
    kept = RunDirectory(plan.parent).job
    if not kept.is_file():
        raise HeterodyneError(
            f"{plan} is a plan without its model, and no {kept.name} is beside it: name the job with --job JOB.yaml"
        )
    return kept


def _require_trust(job: Path, wanted: Job) -> None:
    """Ask before code of another user runs, which a job names. Raises HeterodyneError where the answer is no, or there is no terminal."""
    code = [
        name for name in (wanted.model.factory, wanted.model.loss_count, wanted.data.dataset) if name and ":" in name
    ]
    base = wanted.base(job)
    files = [base / place for name in code if (place := name.rpartition(":")[0]).endswith(".py")]
    foreign = next((path for path in (job.parent, job, base, *files) if path.exists() and _is_of_others(path)), None)
    if not code or foreign is None:
        return
    question = (
        f"{foreign} is somebody else's, and to simulate its plan runs the code that its job names ({', '.join(code)})"
    )
    if not (sys.stdin.isatty() and typer.confirm(printable(f"{question}. Run it?"), err=True)):
        raise HeterodyneError(f"{question}: look at it, then name the job with --job, or say --trust")


def _is_of_others(path: Path) -> bool:
    """Return whether another user owns it, but for the system's own, or anybody may write to it."""
    status = path.stat()
    others_write = bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    return hasattr(os, "geteuid") and (status.st_uid not in (os.geteuid(), 0) or others_write)


def _known(folder: Path, cluster: Path | None, profile: Path | None) -> tuple[Cluster | None, Profile | None]:
    """Return what is named; else what is kept in the folder, if it is that of a run, which keeps both. Raises ClusterError or
    MeasureError."""
    run = RunDirectory(folder)
    of_run = run.cluster.is_file() and run.profile.is_file()
    described = load_cluster(cluster) if cluster is not None else None
    if described is None and of_run:
        described = cluster_from_json(read_text(run.cluster), path=str(run.cluster))
    if profile is None and of_run:
        profile = run.profile
    return described, None if profile is None else Profile.load(profile)
