"""``heterodyne launch``: start one job on all hosts of a cluster file, over ssh or by Ray."""

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
    ray: Annotated[
        bool, typer.Option("--ray", help="Start them by Ray, in a bundle of resources for each host.")
    ] = False,
    logs: Annotated[Path | None, typer.Option(help="Where what the other hosts write is kept.")] = None,
) -> int:
    """Start one job on the hosts of a cluster file, over ssh or by Ray.

    One process for each device. The first host writes to the terminal. All end when one fails, and with Ctrl-C.
    """
    from heterodyne.cluster.file import load_cluster
    from heterodyne.errors import ClusterError
    from heterodyne.processes.launch import WorkerSpec, launch_workers
    from heterodyne.submit.groups import Launch, groups_of, host_commands, nodes_of
    from heterodyne.submit.ray import launch_on_ray
    from heterodyne.submit.remote import node_command

    found, launch = load_cluster(cluster), Launch(command=words, port=port)
    before = [f"cd {shlex.quote(str(directory or Path.cwd()))}", *([setup] if setup else [])]
    if ray:
        return launch_on_ray(found, launch, before, logs=logs)
    hosts = nodes_of(found)
    if len(hosts) > 1 and not master and hosts[0] in _HERE:
        raise ClusterError(f"the other hosts cannot reach the first one as {hosts[0]!r}: name it with --master")
    specs = [
        WorkerSpec(command=node_command(host, command), explain=partial("it ran on host {}".format, host))
        for host, command in host_commands(groups_of(found), hosts, launch, before, master=master or hosts[0])
    ]
    return launch_workers(specs, logs=logs)
