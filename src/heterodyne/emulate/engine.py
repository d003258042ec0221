"""A cluster of unequal workers on one machine: each runs the same command, slowed down from outside.

The command knows nothing of it: it gets the environment of torchrun and may be any program that runs under torchrun.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from heterodyne.emulate.cgroups import (
    PERIOD_US,
    Controller,
    Hierarchy,
    WorkerGroup,
    find_hierarchies,
    remove_leftovers,
    worker_groups,
)
from heterodyne.emulate.duty_cycle import PERIOD_S, DutyCycle, duty_cycle
from heterodyne.emulate.host_spaces import HostSpace, host_spaces, written_by
from heterodyne.emulate.host_spaces import why_not as why_no_hosts
from heterodyne.emulate.network import WorkerNetwork, remove_leftover_namespaces, why_not, worker_networks
from heterodyne.errors import EmulateError
from heterodyne.processes import (
    WorkerSpec,
    launch_workers,
    most_workers,
    shell_status,
    stop_requests,
    to_standard_error,
)
from heterodyne.units import format_bandwidth, format_bytes

__all__ = ["Mechanism", "emulate", "group_parents"]

Mechanism = Literal["auto", "cgroup", "signals"]

_LINUX = platform.system() == "Linux"
_LEAST_SPEED = 1e-3  # the kernel's least quota is 1 ms, in a period of 1 s at most
_LEAST_MEMORY, _MOST_MEMORY = 2**20, 2**50
_LEAST_LINK = 1_000.0
_CONTROLLERS: tuple[Controller, ...] = ("cpu", "memory")
_Number = TypeVar("_Number", int, float)
_Parents = tuple[tuple[Hierarchy, Path], ...]


def emulate(
    speeds: Sequence[float],
    command: Sequence[str],
    *,
    memory: Sequence[int] | None = None,
    links: Sequence[float] | None = None,
    hosts: Sequence[int] | None = None,
    own_disks: Path | None = None,
    mechanism: Mechanism = "auto",
    logs: Path | None = None,
    grace_s: float = 5.0,
    say: Callable[[str], None] = to_standard_error,
) -> int:
    """Run `command` once for each speed, each copy held to that share of one core, and return the exit status.

    Processes are started, watched and ended as by `launch_workers`. Whatever was made for the emulation is removed at its
    end; what an earlier one left that was killed is removed at the start.

    Args:
        speeds: for each rank, CPU time over time: 0 < speed <= 1, because a worker has one thread.
        command: the program and its arguments.
        memory: bytes for each rank, or one number for all; None: no limit.
        links: bytes per second, in each direction, between each rank (of ``hosts``, each host) and one switch, or one number for all;
            None: no limit.
        hosts: for each rank, the number of the host that it is on, from 0 on; ranks of one host have one name, one network and one link,
            and share memory with each other only. They need ``links``. None: one machine, or a machine for each rank that has a link.
        own_disks: a folder of which each of the hosts sees a copy of its own; what it writes there stays in ``FOLDER.hosts/host-N``, and is
            in its copy at the next time.
        mechanism: ``cgroup`` (a CPU quota), ``signals`` (SIGSTOP and SIGCONT), or ``auto``: the first if it can be had.
        logs: where the output of the ranks other than 0 goes; None: a temporary directory, kept only after a failure.
        say: takes each line for people.

    Raises:
        EmulateError: a number out of range, or a limit that cannot be set on this machine by this user.
        WorkerError: the command cannot be started.
    """
    memory = _for_each(memory, len(speeds), "memory")
    ends = len(speeds) if hosts is None else 1 + max(hosts, default=-1)
    links = _for_each(links, ends, "links")
    _check(speeds, command, memory, links)
    if hosts is not None and (links is None or len(hosts) != len(speeds) or set(hosts) != set(range(ends))):
        raise EmulateError(
            f"hosts: {list(hosts)} for {len(speeds)} workers; give each a number from 0 on, and the links of the hosts"
        )
    if own_disks is not None and (hosts is None or not own_disks.is_dir() or not own_disks.resolve().name):
        raise EmulateError(f"own disks need hosts, and a folder that is there and not '/': {own_disks}")
    with ExitStack() as stack:
        stop = stack.enter_context(stop_requests())  # so that a signal while things are made or removed leaves nothing
        _clean(say)
        parents, by_quota = _choose(mechanism, with_memory=memory is not None)
        if links is not None and (reason := why_not(user=os.geteuid())) is not None:
            raise EmulateError(f"links cannot be limited here: {reason}; leave out the links")
        if hosts is not None and (reason := why_no_hosts()) is not None:
            raise EmulateError(f"hosts cannot be emulated here: {reason}")
        say(_describe(speeds, memory, links, parents, by_quota=by_quota))
        if (cores := _cores()) < sum(speeds):
            say(f"heterodyne: the speeds add up to {sum(speeds):g} on {cores} cores: expect less than asked for.")
        groups = stack.enter_context(
            worker_groups(parents, speeds=speeds if by_quota else None, memory=memory, workers=len(speeds))
        )
        networks = None if links is None else stack.enter_context(worker_networks(links))
        cycle = None if by_quota else stack.enter_context(duty_cycle())
        folder = None if own_disks is None else own_disks.resolve()
        if folder is not None:
            say(f"heterodyne: what each host writes into {folder} is in {written_by(folder, 0).with_name('host-N')}.")
        spaces = None if hosts is None else stack.enter_context(host_spaces(ends, folder))
        specs = _specs(command, speeds, groups, networks, cycle, hosts, spaces)
        if stop.number is not None:
            return shell_status(-stop.number)
        return launch_workers(specs, logs=logs, grace_s=grace_s, say=say)


def _specs(
    command: Sequence[str],
    speeds: Sequence[float],
    groups: Sequence[WorkerGroup],
    networks: Sequence[WorkerNetwork] | None,
    cycle: DutyCycle | None,
    hosts: Sequence[int] | None,
    spaces: Sequence[HostSpace] | None,
) -> list[WorkerSpec]:
    ends = range(len(speeds)) if hosts is None else hosts

    def entering(rank: int) -> Sequence[str]:
        networked = command if networks is None else networks[ends[rank]].enter(command)
        return networked if spaces is None else spaces[ends[rank]].enter(networked)

    return [
        WorkerSpec(
            command=group.enter(entering(rank)),
            environment=({} if networks is None else networks[ends[rank]].environment)
            | ({} if hosts is None else _place(rank, hosts)),
            on_start=None if cycle is None else partial(cycle.pace, speed=speed),
            explain=group.explain,
        )
        for rank, (speed, group) in enumerate(zip(speeds, groups, strict=True))
    ]


def _place(rank: int, hosts: Sequence[int]) -> dict[str, str]:
    """Return what torchrun tells a worker of its place on its host."""
    return {
        "LOCAL_RANK": str(list(hosts[:rank]).count(hosts[rank])),
        "LOCAL_WORLD_SIZE": str(list(hosts).count(hosts[rank])),
        "GROUP_RANK": str(hosts[rank]),
        "GROUP_WORLD_SIZE": str(len(set(hosts))),
    }


def _for_each(values: Sequence[_Number] | None, workers: int, what: str) -> Sequence[_Number] | None:
    if values is None or len(values) == workers:
        return values
    if len(values) == 1:
        return list(values) * workers
    raise EmulateError(f"{what}: {len(values)} values for {workers} workers; give one for each, or one for all")


def _check(
    speeds: Sequence[float], command: Sequence[str], memory: Sequence[int] | None, links: Sequence[float] | None
) -> None:
    """Raises EmulateError with all that is wrong."""
    if len(speeds) > (most := most_workers()):
        raise EmulateError(
            f"{len(speeds):,} speeds are as many workers, and this machine is given {most} at most: name fewer"
        )
    faults = [] if speeds else ["no speeds: give one for each worker, for example 0.7,0.35"]
    faults += [
        f"the speed of rank {rank} is {speed:g}; it must be at least {_LEAST_SPEED:g} and at most 1 (a worker has one thread)"
        for rank, speed in enumerate(speeds)
        if not _LEAST_SPEED <= speed <= 1
    ]
    faults += [
        f"the memory of rank {rank} is {format_bytes(size)}; it must be from {format_bytes(_LEAST_MEMORY)} to {format_bytes(_MOST_MEMORY)}"
        for rank, size in enumerate(memory or ())
        if not _LEAST_MEMORY <= size <= _MOST_MEMORY
    ]
    faults += [
        f"the link of rank {rank} has {format_bandwidth(link)}; it must have at least {format_bandwidth(_LEAST_LINK)}"
        for rank, link in enumerate(links or ())
        if not link >= _LEAST_LINK
    ]
    if not command:
        faults.append("no command: write it after --")
    elif shutil.which(command[0]) is None:
        faults.append(f"{command[0]!r} is no program that can be run")
    if faults:
        raise EmulateError("\n  ".join(faults))


def _choose(mechanism: Mechanism, *, with_memory: bool) -> tuple[_Parents, bool]:
    """Return where groups can be made, and whether the CPU share is by quota there. Raises EmulateError."""
    memory: frozenset[Controller] = frozenset({"memory"} if with_memory else ())
    if mechanism != "signals":
        parents = group_parents(memory | {"cpu"})
        if parents is not None:
            return parents, True
        if mechanism == "cgroup":
            raise EmulateError(
                "no control group with a CPU quota can be made here: run as root, or in a delegated group of version 2, "
                "or leave the mechanism to be chosen"
            )
    parents = group_parents(memory)
    if parents is None:
        raise EmulateError(
            "memory cannot be limited here: that needs a control group that can be made (run as root, or in a delegated "
            "group of version 2); leave out the memory"
        )
    return parents, False


def _hierarchies(controllers: frozenset[Controller]) -> tuple[Hierarchy, ...] | None:
    if not _LINUX:
        return None if controllers else ()
    own = Path("/proc/self")
    return find_hierarchies(
        controllers,
        (own / "mountinfo").read_text(encoding="utf-8"),
        (own / "cgroup").read_text(encoding="utf-8"),
    )


def group_parents(controllers: frozenset[Controller]) -> _Parents | None:
    """For each tree that holds one of the controllers, where a group can be made in it; None if that cannot be done."""
    hierarchies = _hierarchies(controllers)
    if hierarchies is None:
        return None
    found = [(hierarchy, hierarchy.parent()) for hierarchy in hierarchies]
    parents = tuple((hierarchy, parent) for hierarchy, parent in found if parent is not None)
    return parents if len(parents) == len(found) else None


def _clean(say: Callable[[str], None]) -> None:
    """Remove what an emulation left that was killed: its groups first, which may hold processes of its namespaces."""
    every = [_hierarchies(frozenset({name})) or () for name in _CONTROLLERS]
    removed = remove_leftovers([hierarchy for found in every for hierarchy in found])
    if os.geteuid() == 0:
        removed += remove_leftover_namespaces()
    if removed:
        say(f"heterodyne: removed what a killed emulation had left: {', '.join(removed)}.")


def _describe(
    speeds: Sequence[float],
    memory: Sequence[int] | None,
    links: Sequence[float] | None,
    parents: _Parents,
    *,
    by_quota: bool,
) -> str:
    versions = "/".join(sorted({str(h.version) for h, _ in parents if "cpu" in h.controllers}))
    how = (
        f"CPU quota by control groups, version {versions}, every {PERIOD_US / 1000:g} ms or more"
        if by_quota
        else f"SIGSTOP and SIGCONT, about every {PERIOD_S * 1000:g} ms"
    )
    parts = [f"{len(speeds)} workers at {', '.join(f'{s:g}' for s in speeds)} of a core ({how})"]
    if memory is not None:
        parts.append(f"memory {', '.join(dict.fromkeys(map(format_bytes, memory)))}")
    if links is not None:
        parts.append(f"links of {', '.join(dict.fromkeys(map(format_bandwidth, links)))} in network namespaces")
    return f"heterodyne: emulating {'; '.join(parts)}."


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count() or 1
