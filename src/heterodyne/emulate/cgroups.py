"""Limits by control groups: a share of one core, bytes of memory, for a worker and all that it starts.

Both versions are spoken. A machine can mount both (hybrid): then a controller is where version 1 has it, else where
version 2 has it. Version 2 allows a process one group only, so there all limits of a worker meet in one directory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heterodyne.emulate.names import is_leftover, name_of
from heterodyne.errors import EmulateError
from heterodyne.units import format_bytes

__all__ = ["Hierarchy", "WorkerGroup", "find_hierarchies", "remove_leftovers", "worker_groups"]

Controller = Literal["cpu", "memory"]

PERIOD_US = 4_000
"""Short, so that a throttled worker stutters in milliseconds as a slow device would not."""
_LEAST_QUOTA_US = 1_000  # the kernel takes no less
_MOST_WEIGHT = {1: ("cpu.shares", 262_144), 2: ("cpu.weight", 10_000)}
_REMOVAL_S = 5.0

# Enter each group, then become the program: no moment at which the program runs without its limits.
_ENTER = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1" || exit 126; shift; n=$((n-1)); done; exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """A mounted tree of groups and the controllers that we need from it.

    Args:
        candidates: directories that may hold our groups, the caller's own group first, then its ancestors.
    """

    version: Literal[1, 2]
    controllers: frozenset[Controller]
    candidates: tuple[Path, ...]

    @property
    def root(self) -> Path:
        return self.candidates[-1]

    def parent(self) -> Path | None:
        """The nearest directory in which a group with all the controllers can be made; None if there is none.

        Nearest, so that limits which somebody set around the caller still hold for the workers.
        """
        return next((place for place in self.candidates if self._bears(place)), None)

    def _bears(self, place: Path) -> bool:
        trial = place / name_of("trial")
        try:
            if self.version == 2:
                wanted = self.controllers - set((place / "cgroup.subtree_control").read_text().split())
                if wanted:  # refused where processes live in the group itself, unless it is the root of the machine
                    (place / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(wanted)))
            trial.mkdir()
        except OSError:
            return False
        try:
            # A process can be moved only by who may write to the common ancestor of both places.
            return os.access(place / "cgroup.procs", os.W_OK) and all(
                (trial / name).exists() for name in self._files().values()
            )
        finally:
            trial.rmdir()

    def _files(self) -> dict[Controller, str]:
        of_version: dict[Controller, str] = (
            {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes"}
            if self.version == 1
            else {"cpu": "cpu.max", "memory": "memory.max"}
        )
        return {name: file for name, file in of_version.items() if name in self.controllers}


def find_hierarchies(controllers: frozenset[Controller], mountinfo: str, own: str) -> tuple[Hierarchy, ...] | None:
    """The trees that hold the controllers; None if one of them is nowhere.

    Args:
        mountinfo: the text of ``/proc/self/mountinfo``.
        own: the text of ``/proc/self/cgroup``.
    """
    mounts = list(_mounts(mountinfo))
    groups = {
        name: path for _, names, path in (line.split(":", 2) for line in own.splitlines()) for name in names.split(",")
    }
    found: dict[tuple[Literal[1, 2], tuple[Path, ...]], set[Controller]] = {}
    for controller in controllers:
        of_version_1 = [m for m in mounts if m.version == 1 and controller in m.options]
        fitting = of_version_1 or [m for m in mounts if m.version == 2]
        if not fitting:
            return None
        mount = fitting[0]
        path = groups.get(controller if mount.version == 1 else "", "/")
        found.setdefault((mount.version, _candidates(mount, path)), set()).add(controller)
    return tuple(
        Hierarchy(version=version, controllers=frozenset(names), candidates=candidates)
        for (version, candidates), names in found.items()
    )


@dataclass(frozen=True, kw_only=True)
class _Mount:
    version: Literal[1, 2]
    root: str
    point: Path
    options: frozenset[str]


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(), after.split()
        if kind in {"cgroup", "cgroup2"}:
            options = frozenset(rest[-1].split(","))
            yield _Mount(version=1 if kind == "cgroup" else 2, root=fields[3], point=Path(fields[4]), options=options)


def _candidates(mount: _Mount, own: str) -> tuple[Path, ...]:
    """The caller's group and its ancestors, as directories; a container may see only a part of the tree."""
    inside = own.removeprefix(mount.root.rstrip("/")) if own.startswith(mount.root) else "/"
    place = mount.point / inside.lstrip("/")
    return (place, *(p for p in place.parents if p.is_relative_to(mount.point)))


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """The groups of one worker: a directory for each hierarchy."""

    directories: tuple[tuple[Hierarchy, Path], ...]
    memory: int | None

    def enter(self, command: Sequence[str]) -> tuple[str, ...]:
        """The command that enters the groups and becomes `command`, under the same process number."""
        files = [str(directory / "cgroup.procs") for _, directory in self.directories]
        return ("sh", "-c", _ENTER, "sh", str(len(files)), *files, *command)

    def explain(self) -> str | None:
        """Words about the memory limit, if the kernel has killed a process of this worker for it."""
        for hierarchy, directory in self.directories:
            if "memory" in hierarchy.controllers and self.memory is not None:
                file = directory / ("memory.oom_control" if hierarchy.version == 1 else "memory.events")
                events = dict(line.split(None, 1) for line in file.read_text().splitlines())
                if int(events.get("oom_kill", 0)):
                    return f"it reached its memory limit of {format_bytes(self.memory)}"
        return None


@contextmanager
def worker_groups(
    parents: Sequence[tuple[Hierarchy, Path]],
    *,
    speeds: Sequence[float] | None,
    memory: Sequence[int] | None,
    workers: int,
) -> Iterator[tuple[WorkerGroup, ...]]:
    """Groups with the limits, one for each worker; processes left in them are killed, and they are removed, at the end.

    Args:
        parents: where to make them, from `Hierarchy.parent`.
        speeds: shares of a core, or None: no limit.
        memory: bytes, or None: no limit.

    Raises:
        EmulateError: the limits cannot be set here.
    """
    made: list[Path] = []
    try:
        groups = []
        for rank in range(workers):
            directories = []
            for hierarchy, parent in parents:
                directory = parent / name_of(rank)
                directory.mkdir()
                made.append(directory)
                directories.append((hierarchy, directory))
                if speeds is not None and "cpu" in hierarchy.controllers:
                    _limit_cpu(hierarchy.version, directory, speeds[rank])
                if memory is not None and "memory" in hierarchy.controllers:
                    _limit_memory(hierarchy.version, directory, memory[rank])
            groups.append(WorkerGroup(directories=tuple(directories), memory=None if memory is None else memory[rank]))
        yield tuple(groups)
    finally:
        for directory in made:
            _remove(directory)


def remove_leftovers(hierarchies: Sequence[Hierarchy]) -> list[str]:
    """Remove the groups of emulations whose maker is dead, with the processes in them. Returns what was removed."""
    removed = []
    for hierarchy in hierarchies:
        for place, directories, _ in os.walk(hierarchy.root):
            for name in [name for name in directories if is_leftover(name)]:
                directories.remove(name)
                _remove(Path(place) / name)
                removed.append(str(Path(place) / name))
    return removed


def _limit_cpu(version: Literal[1, 2], directory: Path, speed: float) -> None:
    """A quota of CPU time a period, and what was left over of one period carried into the next one.

    The carried half makes up for the kernel's coarse clock: without it a worker misses a few percent of its share. The
    weight lets the quota decide, not whatever else runs on the machine.
    """
    period_us = max(PERIOD_US, -(-_LEAST_QUOTA_US // speed))
    quota_us = max(_LEAST_QUOTA_US, round(speed * period_us))
    if version == 1:
        _write(directory / "cpu.cfs_period_us", f"{period_us:.0f}")
        _write(directory / "cpu.cfs_quota_us", f"{quota_us}")
    else:
        _write(directory / "cpu.max", f"{quota_us} {period_us:.0f}")
    burst = directory / ("cpu.cfs_burst_us" if version == 1 else "cpu.max.burst")
    with suppress(OSError):  # younger than the quota itself
        burst.write_text(str(quota_us // 2))
    name, weight = _MOST_WEIGHT[version]
    with suppress(OSError):
        (directory / name).write_text(str(weight))


def _limit_memory(version: Literal[1, 2], directory: Path, size: int) -> None:
    """Without swap: a device has none."""
    if version == 1:
        _write(directory / "memory.limit_in_bytes", str(size))
        swap = directory / "memory.memsw.limit_in_bytes"  # the sum of both
    else:
        _write(directory / "memory.max", str(size))
        swap = directory / "memory.swap.max"
    with suppress(OSError):  # a kernel without swap accounting
        swap.write_text(str(size) if version == 1 else "0")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise EmulateError(f"{file} does not take {text!r}: {error.strerror}") from error


def _remove(directory: Path) -> None:
    """Kill what is left in the group and remove it; the kernel needs a moment after the last process."""
    until = time.monotonic() + _REMOVAL_S
    while directory.exists() and time.monotonic() < until:
        with suppress(OSError):
            for pid in (directory / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            directory.rmdir()
            return
        time.sleep(0.01)
