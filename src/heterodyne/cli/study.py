"""``heterodyne study``: how a job scales over devices, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from heterodyne.cli.options import ClusterOption, JobArgument, ProfileOption, SetOption, require_place
from heterodyne.cluster.profile import Profile
from heterodyne.errors import HeterodyneError, UnitError
from heterodyne.job import Job, Strategy
from heterodyne.processes import to_standard_error
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment

__all__ = ["command"]

_PICTURES = (".svg", ".png", ".pdf")


def command(
    job: JobArgument,
    devices: Annotated[str, typer.Option("--devices", metavar="N,N,...", help="Numbers of devices: 1,2,4.")],
    plans: Annotated[
        str, typer.Option("--plans", metavar="A,B,...", help=f"Strategies, of {', '.join(get_args(Strategy))}.")
    ] = "data,pipeline,split",
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
    run: Annotated[
        bool, typer.Option("--run", help="Train a few steps of each cell, in processes of its own, and measure.")
    ] = False,
    speeds: Annotated[
        str | None,
        typer.Option("--speeds", metavar="A,B,...", help="With --run: on emulated workers, as 'heterodyne emulate'."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=3, help="With --run: the steps of each cell.")] = 20,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The study: it is written after each cell, and gone on with.")
    ] = Path("study.json"),
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="The curves; by default beside the study, as .svg.")
    ] = None,
    overrides: SetOption = None,
) -> int:
    """Show how a job scales: speed-up, efficiency, cost and energy.

    For each number of devices (the first so many) and each strategy the best plan, with its step, its memory, its price and its energy:
    a table, a file and a picture. On paper from datasheets or a profile; with --run as trained, the prediction beside it. The same command
    again does what is left to do.
    """
    # Read before torch is loaded, so that a mistake is reported at once.
    wanted = Job.load(job, tuple(overrides or ()))
    counts, strategies = _counts(devices), _strategies(plans)
    workers = () if speeds is None else tuple(map(_speed, speeds.split(",")))
    if WorkerEnvironment.read() is not None:
        raise HeterodyneError(
            "a study starts its own workers: start 'heterodyne study' by itself, not under a launcher"
        )
    if speeds is not None and not run:
        raise HeterodyneError("--speeds are those of workers that run: add --run")
    if not run and cluster is None:
        raise HeterodyneError(
            "a study on paper needs the file that describes the devices: add --cluster FILE, or --run to measure on those that are here"
        )
    if run and profile is not None:
        raise HeterodyneError("--run measures by itself: leave out --profile, or leave out --run to plan from it")
    if profile is not None:
        Profile.load(profile)
    picture = picture or out.with_suffix(".svg")
    for path, option in ((out, "--out"), (picture, "--picture")):
        require_place(path, option)
    if picture.suffix.lower() not in _PICTURES:
        raise HeterodyneError(f"--picture {picture}: a picture is one of {', '.join(_PICTURES)}; call it study.svg")
    if picture == out:
        raise HeterodyneError(f"--out {out}: the picture would take its place; call the study study.json")
    from heterodyne.api import StudyWishes, study_job

    wishes = StudyWishes(
        counts=counts,
        strategies=strategies,
        cluster_file=cluster,
        profile=profile,
        steps=steps if run else None,
        speeds=workers,
        overrides=tuple(overrides or ()),
        out=out,
        picture=picture,
    )
    return study_job(wanted, job, wishes, to_standard_error)


def _counts(text: str) -> tuple[int, ...]:
    """Raises UnitError for what is no number of devices."""
    for word in text.split(","):
        if not (word.strip().isascii() and word.strip().isdecimal() and 1 <= int(word) <= 100_000):
            raise UnitError(f"--devices {text}: {word.strip()!r} is no number of devices; write for example 1,2,4")
    return tuple(sorted({int(word) for word in text.split(",")}))


def _strategies(text: str) -> tuple[Strategy, ...]:
    known: dict[str, Strategy] = {name: name for name in get_args(Strategy)}
    for word in text.split(","):
        if word.strip() not in known:
            raise HeterodyneError(f"--plans {text}: {word.strip()!r} is no strategy; there are {', '.join(known)}")
    return tuple(dict.fromkeys(known[word.strip()] for word in text.split(",")))


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UnitError(f"--speeds: {text!r} is not a number; write for example 0.7,0.35,0.35") from None
