"""One process a device: where no launcher started us as one of many, we are the launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from heterodyne.cluster.file import load_cluster
from heterodyne.errors import ClusterError
from heterodyne.processes import WorkerSpec, launch_workers, most_workers
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.units import counted, format_bytes

__all__ = ["command_of", "on_every_device", "run_workers", "workers_here"]


def on_every_device(arguments: Sequence[str], cluster_file: Path | None) -> int | None:
    """Run ``heterodyne ARGUMENTS`` once for each device of this machine; None if this process can do it alone, see `workers_here`.

    Returns the exit status of the workers.
    """
    count = workers_here(cluster_file)
    return None if count is None else run_workers(count, arguments)


def workers_here(cluster_file: Path | None) -> int | None:
    """Return how many workers to start on this machine, a device each; None if this process can do it alone.

    That is so if a launcher made it a worker already, or if there is one device only. The devices are those of the cluster
    file; without one the accelerators, or else the CPU.

    Raises ClusterError for a file with several nodes: a launcher that reaches them (torchrun, Slurm) must start the workers. And for one
    with more devices than this machine could run workers.
    """
    if WorkerEnvironment.read() is not None:
        return None
    if cluster_file is None:
        import torch  # who is given a file starts workers without it: they load it themselves

        count = max(1, torch.accelerator.device_count() if torch.accelerator.is_available() else 0)
    else:
        cluster = load_cluster(cluster_file)
        nodes = list(dict.fromkeys(device.node for device in cluster.devices))
        if len(nodes) > 1:
            raise ClusterError(
                f"it has {len(nodes)} nodes ({', '.join(nodes)}), and this command starts workers on this machine only: start it "
                "on each node with torchrun, a process a device, in the order of the file",
                path=str(cluster_file),
            )
        count = len(cluster.devices)
        if count > (most := most_workers()):
            raise ClusterError(
                f"it has {counted(count, 'device')}, a worker each, and with {counted(os.cpu_count() or 1, 'core')} and "
                f"{format_bytes(psutil.virtual_memory().total)} of memory this machine is given {most} at most: lower 'count', or start "
                "the workers with torchrun",
                path=str(cluster_file),
            )
    return None if count == 1 else count


def run_workers(count: int, arguments: Sequence[str], explain: Callable[[int], str | None] = lambda _: None) -> int:
    """``heterodyne ARGUMENTS`` on so many; the exit status. ``explain``: what is known of the end of a rank that failed."""
    command = command_of(arguments)
    return launch_workers([WorkerSpec(command=command, explain=partial(explain, rank)) for rank in range(count)])


def command_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """``heterodyne ARGUMENTS`` as a program and its arguments."""
    # -P: what lies in the current directory must not stand in for a library
    return (sys.executable, "-P", "-m", "heterodyne", *arguments)
