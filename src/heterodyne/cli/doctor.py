"""``heterodyne doctor``: what is wrong with this machine, or with several, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterodyne.cli.options import ClusterOption

__all__ = ["command"]


def command(
    cluster: ClusterOption = None,
    directory: Annotated[Path, typer.Option(help="Where runs are to be written.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of the run, looked at on one machine.")] = 29500,
) -> int:
    """Say what is wrong with this machine, or with several.

    Under torchrun or heterodyne launch it looks at all hosts and at the links between them; alone, the exit status is 1 if anything is
    wrong.
    """
    from heterodyne.api.printing import show
    from heterodyne.cluster.file import load_cluster
    from heterodyne.doctor import examine
    from heterodyne.doctor.rows import fault_rows, host_rows, link_rows

    found = examine(directory, port, None if cluster is None else load_cluster(cluster))
    if found is None:
        return 0
    show(host_rows(found.hosts, found.interfaces), *([link_rows(found.links)] if found.links else []))
    if found.faults:
        show(fault_rows(found.faults))
        return int(len(found.hosts) == 1)  # launchers would tell of a failure on top
    typer.echo("nothing is wrong")
    return 0
