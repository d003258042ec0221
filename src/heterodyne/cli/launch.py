"""``heterodyne launch``: start one job on all hosts of a cluster file over ssh."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]

_HERE = ("localhost", "127.0.0.1", "::1")


def command(
    cluster: Annotated[
        Path, typer.Argument(help="Cluster file. Its nodes have the names of hosts, as ssh knows them.")
    ],
    words: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What one process runs: -- python train.py")],
    directory: Annotated[Path | None, typer.Option(help="Where it runs, on every host; else here.")] = None,
    setup: Annotated[str, typer.Option(help="Run before it, in the shell: 'source .venv/bin/activate'.")] = "",
    master: Annotated[str, typer.Option(help="How hosts reach the first one, if not by its name.")] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="A free port of the first host.")] = 29500,
    logs: Annotated[Path | None, typer.Option(help="Where what the other hosts write is kept.")] = None,
) -> int:
    """Start one job on the hosts of a cluster file, over ssh.

    One process for each device. The first host writes to the terminal. All end when one fails, and with Ctrl-C.
    """
    from heterodyne.cluster.file import load_cluster
    from heterodyne.errors import ClusterError
    from heterodyne.processes.launch import WorkerSpec, launch_workers
    from heterodyne.submit.groups import Launch, groups_of, nodes_of, torchrun
    from heterodyne.submit.remote import node_command

    found, launch = load_cluster(cluster), Launch(command=words, port=port)
    groups, hosts = groups_of(found), nodes_of(found)
    if len(hosts) > 1 and not master and hosts[0] in _HERE:
        raise ClusterError(f"the other hosts cannot reach the first one as {hosts[0]!r}: name it with --master")
    before = [f"cd {shlex.quote(str(directory or Path.cwd()))}", *([setup] if setup else [])]
    specs = []
    for group in groups:
        for place in range(group.nodes):
            host = hosts[group.first + place]
            program = torchrun(group, groups, launch, node=str(place), master=shlex.quote(master or hosts[0]))
            specs.append(
                WorkerSpec(
                    command=node_command(host, " && ".join([*before, f"exec {program}"])),
                    explain=partial("it ran on host {}".format, host),
                )
            )
    return launch_workers(specs, logs=logs)
