"""``heterodyne plan``: who should do how much, and why."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from heterodyne.cli.options import ClusterOption, JobArgument, ProfileOption, SetOption, require_place
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.profile import Profile
from heterodyne.errors import HeterodyneError
from heterodyne.job import Job
from heterodyne.processes import to_standard_error
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment

__all__ = ["command"]

_PICTURES = (".png", ".svg", ".pdf")


def command(
    context: typer.Context,
    job: JobArgument,
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where the plan is written: plan.json."),
    ] = None,
    overrides: SetOption = None,
    on_paper: Annotated[
        bool,
        typer.Option(
            "--on-paper", help="Plan from datasheets, without measuring, as is always done for several nodes."
        ),
    ] = False,
    objective: Annotated[
        Literal["throughput", "money", "energy", "memory"],
        typer.Option("--objective", help="What to optimise for."),
    ] = "throughput",
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="USD", min=0, help="The most that the devices may cost in an hour."),
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Show the trade-off of time, money and devices.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="The frontier as a picture.")
    ] = None,
    runnable: Annotated[
        bool,
        typer.Option(
            "--runnable", help="On paper: capture the model, and check that the plan runs with every op of it."
        ),
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", metavar="FILE", help="The step as a trace for Perfetto, a rank for each stage."),
    ] = None,
    families: Annotated[
        bool, typer.Option("--families", help="Show the best of each kind of plan, or why there is none.")
    ] = False,
    sites: Annotated[
        bool,
        typer.Option(
            "--sites",
            help="Compare the ways over sites that a slow link joins: one plan, replicas, training apart.",
        ),
    ] = False,
    add: Annotated[
        list[str] | None,
        typer.Option("--add", metavar="8xH100", help="Compare with a fleet that has these devices too."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="NAME", help="Compare with a fleet without this pool, place or node."),
    ] = None,
    links: Annotated[
        list[str] | None,
        typer.Option("--links", metavar="inter=100Gb/s", help="Compare with a fleet that has these links."),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework",
            metavar="NAME",
            help="The framework that runs the plan, if not this library; an unknown name lists the known ones.",
        ),
    ] = None,
    export: Annotated[
        Literal["megatron", "torchtitan", "schedule"] | None,
        typer.Option("--export", help="Write an even plan for another framework too."),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            "--within", metavar="SECONDS", min=0, help="End the search after this time, with the best plan so far."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> int:
    """Choose who does how much, and say why.

    Measure (or read a profile), weigh the plans, print the choice with its reasons, and write it. For devices that are not here, plan
    on paper: from datasheets.
    """
    from heterodyne.api.wishes import Wishes
    from heterodyne.search.fleet.objective import Objective

    # Read before torch is loaded and workers are started, so that a mistake in a file is reported at once.
    wanted = Job.load(job, tuple(overrides or ())).here
    for option, number in (("--within", within), ("--budget", budget)):
        if number is not None and not math.isfinite(number):
            raise HeterodyneError(f"{option} {number}: write a finite number, or leave it out")
    if sites:
        plans = {
            "--out": out, "--families": families, "--frontier": frontier, "--export": export, "--timeline": timeline,
            "--runnable": runnable, "--budget": budget, "--objective": objective != "throughput",
        }  # fmt: skip
        given = [option for option, value in plans.items() if value]
        if given:
            raise HeterodyneError(f"--sites compares ways and makes no plan: leave out {', '.join(given)}")
    measured = None if profile is None else Profile.load(profile)
    wishes = Wishes(
        objective=Objective(goal=objective, usd_per_hour=budget),
        frontier=frontier or picture is not None,
        add=tuple(add or ()),
        without=tuple(without or ()),
        links=tuple(links or ()),
        families=families,
        sites=sites,
        framework=framework,
        seconds=within,
        picture=picture,
        export=export,
        timeline=timeline,
        runnable=runnable,
        profile=measured,
        as_json=as_json,
    )
    asked = on_paper or wishes.any
    paper = cluster is not None and WorkerEnvironment.read() is None and (asked or elsewhere(cluster))
    if asked and cluster is not None and not paper:
        raise HeterodyneError(
            "a plan on paper needs no workers: start 'heterodyne plan' by itself, not under torchrun or srun"
        )
    if asked and not paper:
        raise HeterodyneError("to plan on paper, give the file that describes the devices: --cluster fleet.yaml")
    out = out or Path("plan.json")
    for path, option in ((out, "--out"), (picture, "--picture"), (timeline, "--timeline")):
        require_place(path, option)
    if picture is not None and picture.suffix.lower() not in _PICTURES:
        raise HeterodyneError(f"--picture {picture}: a picture is one of {', '.join(_PICTURES)}; call it frontier.png")
    if paper:
        from heterodyne.api.on_paper import plan_on_paper

        assert cluster is not None
        return plan_on_paper(
            wanted, wanted.base(job), cluster_file=cluster, out=out, wishes=wishes, say=to_standard_error
        )
    from heterodyne.api import on_every_device

    launched = on_every_device(context.obj, cluster)
    if launched is not None:
        return launched
    from heterodyne.api import plan_job

    return plan_job(wanted, wanted.base(job), cluster_file=cluster, profile=measured, out=out, as_json=as_json)


def elsewhere(cluster: Path) -> bool:
    """Return whether a file describes several nodes, which one machine cannot be. Unlike devices of one node are several pools."""
    return sum({pool.node_name: pool.nodes for pool in load_fleet(cluster).pools}.values()) > 1
