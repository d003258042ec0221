"""``heterodyne submit``: write what a scheduler takes to start one job on all nodes of a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    cluster: Annotated[Path, typer.Argument(help="Cluster file.")],
    words: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What one process runs: -- python train.py")],
    to: Annotated[str, typer.Option(help="slurm, jobset, trainjob or raycluster.")],
    image: Annotated[str, typer.Option(help="Image of the containers.")] = "",
    name: Annotated[str, typer.Option(help="Name of the job.")] = "heterodyne",
    hours: Annotated[float | None, typer.Option(min=0.0, help="After how many hours the job is ended.")] = None,
) -> int:
    """Write what a scheduler takes, from a cluster file.

    A group for each kind of node, and one process for each device. It goes to standard output; nothing is submitted.
    """
    from heterodyne.cluster.file import load_cluster
    from heterodyne.errors import HeterodyneError
    from heterodyne.submit import SCHEDULERS, Launch

    if to not in SCHEDULERS:
        raise HeterodyneError(f"--to {to}: it is one of {', '.join(SCHEDULERS)}")
    typer.echo(
        SCHEDULERS[to](load_cluster(cluster), Launch(command=words, name=name, image=image, hours=hours)), nl=False
    )
    return 0
