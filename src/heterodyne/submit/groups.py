"""Nodes of a cluster in groups that a scheduler can be asked for."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from heterodyne.cluster import Cluster
from heterodyne.cluster.catalog import find
from heterodyne.errors import ClusterError
from heterodyne.processes import require_no_launcher

__all__ = ["Group", "Launch", "bundle_of", "groups_of", "host_commands", "nodes_of", "torchrun"]

_MOST_HOURS = 8760
_LONGEST_NAME = 40  # schedulers add to it, and host names have 63 characters


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to run: ``command`` is the program of one process and its arguments, without a launcher.

    ``image``: of the containers; ``hours``: after how many the job is ended; None: the scheduler's own limit.
    """

    command: Sequence[str]
    name: str = "heterodyne"
    image: str = ""
    hours: float | None = None
    port: int = 29500

    def __post_init__(self) -> None:
        require_no_launcher(self.command, "this, one for each device")
        if self.hours is not None and not 1 / 60 <= self.hours <= _MOST_HOURS:
            raise ClusterError(
                f"--hours {self.hours:g}: a job is given from one minute (0.017) to a year ({_MOST_HOURS})"
            )
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) or len(self.name) > _LONGEST_NAME:
            raise ClusterError(
                f"the name {self.name!r} of a job has lower-case letters, digits and '-' between them, {_LONGEST_NAME} at most"
            )


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes with the same devices. ``first``: how many nodes are before them; ``devices``: the number of each kind in a node."""

    name: str
    nodes: int
    first: int
    devices: Counter[str] = field(default_factory=Counter)

    @property
    def processes(self) -> int:
        """Return how many processes a node runs."""
        return self.devices.total()

    def resources(self) -> dict[str, int]:
        """Return the devices of a node by the maker that a scheduler knows them by; none for processes on CPUs."""
        found: Counter[str] = Counter()
        for kind, count in self.devices.items():
            if kind != "cpu":
                accelerator = find(kind)
                found[accelerator.maker if accelerator else ""] += count
        return dict(found)


def groups_of(cluster: Cluster) -> list[Group]:
    """Return the nodes of a cluster in its order, so that ranks are those of the cluster file. Raises ClusterError."""
    names = nodes_of(cluster)
    devices_of = {name: Counter(d.kind for d in cluster.devices if d.node == name) for name in names}
    found: list[Group] = []
    for node, devices in devices_of.items():
        last = found[-1] if found else None
        if last is not None and last.devices == devices:
            found[-1] = Group(name=last.name, nodes=last.nodes + 1, first=last.first, devices=devices)
        else:
            first = sum(group.nodes for group in found)
            found.append(Group(name=_label(node, len(found)), nodes=1, first=first, devices=devices))
    return found


def nodes_of(cluster: Cluster) -> list[str]:
    """Return the names of the nodes, in the order of their ranks. Raises ClusterError if devices of two nodes take turns."""
    names = [node for node, _ in groupby(device.node for device in cluster.devices)]
    if len(set(names)) < len(names):
        raise ClusterError(f"the devices of a node of cluster {cluster.name!r} do not follow each other")
    return names


def torchrun(group: Group, groups: Sequence[Group], launch: Launch, *, node: str, master: str) -> str:
    """Return the command that starts the processes of a node.

    Args:
        node: the place of the node in its group, as an expression of the shell.
        master: the host of the first node.
    """
    options = [
        f"--nnodes={sum(each.nodes for each in groups)}",
        f"--node-rank=$(({group.first} + {node}))",
        f"--nproc-per-node={group.processes}",
        f"--master-addr={master}",
        f"--master-port={launch.port}",
    ]
    return " ".join(["torchrun", *options, *_program(launch.command)])


def bundle_of(group: Group) -> dict[str, float]:
    """Return the resources of Ray that a host of a group needs."""
    kinds = {("CPU" if kind == "cpu" else kind): float(count) for kind, count in group.devices.items()}
    gpus = sum(count for maker, count in group.resources().items() if maker)
    return kinds | ({"GPU": float(gpus)} if gpus else {})


def host_commands(
    groups: Sequence[Group], hosts: Sequence[str], launch: Launch, before: Sequence[str], *, master: str
) -> Iterator[tuple[str, str]]:
    """Yield each host with the command of the shell that starts its processes after ``before``."""
    for group in groups:
        for place in range(group.nodes):
            program = torchrun(group, groups, launch, node=str(place), master=shlex.quote(master))
            yield hosts[group.first + place], " && ".join([*before, f"exec {program}"])


def _program(command: Sequence[str]) -> list[str]:
    """Return what torchrun runs: a script by its path, a module by its name, anything else as it is."""
    python = re.fullmatch(r"(.*/)?python[0-9.]*", command[0]) if len(command) > 1 else None
    words = [shlex.quote(word) for word in command]
    return words[1:] if python and (command[1] == "-m" or not command[1].startswith("-")) else ["--no-python", *words]


def _label(name: str, number: int) -> str:
    """Return a name that a host may have."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower())[:12].strip("-0123456789")
    return f"{plain or 'nodes'}-{number}"
