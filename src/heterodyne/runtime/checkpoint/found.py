"""What lies of a checkpoint on the disks of a run, and whether that is all of it.

Each disk is looked at by a rank that sees it: its own manifest, and every byte of every file that it lists. A checkpoint is whole if the
disks together have all that one manifest lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heterodyne.errors import CheckpointError
from heterodyne.job import decisive
from heterodyne.runtime.checkpoint.manifest import Manifest, differences
from heterodyne.text_files import read_text

__all__ = ["OTHER_DATA", "PLAN", "Checkpoint", "Seen", "seen_in", "together"]

OTHER_DATA = (
    "the order of the samples is drawn for all of them together, so with more or fewer of them the run would go on with other ones: "
    "give it the data that it began with"
)
PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was found whole.

    Args:
        path: of its directory, on every disk.
        plan: the text of the plan that it was written under.
        there: of each disk of the run, the files that are good there.
    """

    path: Path
    manifest: Manifest
    plan: str
    there: tuple[frozenset[str], ...]

    @property
    def step(self) -> int:
        return self.manifest.step

    def require(self, identity: Mapping[str, Any]) -> None:
        """Raises CheckpointError, with the fields that differ, if it is of a run of another identity."""
        there = dict(self.manifest.identity)
        if "job" in there:
            there["job"] = decisive(there["job"])  # an older release recorded more fields
        other = differences(there, identity)
        if other and all(line.startswith("data.") for line in other):
            raise CheckpointError(
                f"{self.path} was written with other data:\n  - "
                + "\n  - ".join(other)
                + f"\n{OTHER_DATA}, or start anew in another "
                "run directory"
            )
        if other:
            raise CheckpointError(
                f"{self.path} belongs to another job:\n  - "
                + "\n  - ".join(other)
                + "\nresume with the job that wrote it, or start anew in another run directory"
            )


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one disk has of a checkpoint.

    Args:
        manifest: None: there is none that can be used.
        good: the files that are as it lists them.
        damaged: of files that are not, what is wrong.
        fault: why nothing there is to be used; "" if it is.
        plan: the text of its plan, if that file is good.
    """

    manifest: Manifest | None = None
    good: frozenset[str] = frozenset()
    damaged: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""
    plan: str = ""


def seen_in(path: Path) -> Seen | None:
    """Look at a directory, at every byte of it; None if there is no such directory."""
    if not path.is_dir():
        return None
    odd = sorted(entry.name for entry in path.iterdir() if not entry.is_file())
    if odd:  # to read a pipe would wait for ever
        return Seen(fault=f"{', '.join(odd)} cannot be read as a file")
    try:
        manifest = Manifest.load(path)
        good, damaged = manifest.compare(path)
        plan = read_text(path / PLAN) if PLAN in good else ""
        if out_of_place := manifest.out_of_place(path):
            return Seen(damaged=damaged, fault="; ".join(out_of_place))
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        return Seen(fault=str(error))
    return Seen(manifest=manifest, good=good, damaged=damaged, plan=plan)


def together(path: Path, of_disks: Sequence[Seen | None], hosts: Sequence[Sequence[str]]) -> Checkpoint:
    """Return the checkpoint that the disks, whose ``hosts`` are named, have together.

    Raises CheckpointError that tells what is missing, and where it was written.
    """
    if not any(of_disks):
        raise CheckpointError(f"there is no checkpoint {path}")
    manifests = [seen.manifest for seen in of_disks if seen is not None and seen.manifest is not None]
    missing: list[str] = []
    for manifest in sorted(manifests, key=manifests.count, reverse=True):  # the order of disks decides between equals
        there = tuple(seen.good if seen and seen.manifest == manifest else frozenset() for seen in of_disks)
        lacking = [name for name in manifest.files if not any(name in good for good in there)]
        if not lacking:
            plan = next(seen.plan for seen in of_disks if seen and seen.manifest == manifest and PLAN in seen.good)
            return Checkpoint(path=path, manifest=manifest, plan=plan, there=there)
        lacking = [name for name in lacking if not any(seen and name in seen.damaged for seen in of_disks)]
        missing = missing or _missing(lacking, manifest, {host for of_disk in hosts for host in of_disk})
    wrong = [
        fault if len(of_disks) == 1 else f"{fault} ({', '.join(names)})"
        for seen, names in zip(of_disks, hosts, strict=True)
        if seen is not None
        for fault in (*seen.damaged.values(), seen.fault)
        if fault
    ]
    raise CheckpointError(f"{path} is no whole checkpoint: {'; '.join([*wrong, *missing])}")


def _missing(names: Sequence[str], manifest: Manifest, here: set[str]) -> list[str]:
    """Tell which files are missing, and of those whose hosts are gone, which hosts these are."""
    gone: dict[str, list[str]] = {}
    faults = []
    for name in names:
        written_on = manifest.hosts.get(name, [])
        if written_on and not here & {*written_on}:
            gone.setdefault(", ".join(written_on), []).append(name)
        else:
            faults.append(
                f"{name} is missing" + (f" (it was written on {', '.join(written_on)})" if written_on else "")
            )
    return faults + [
        f"{', '.join(files)} {'lies' if len(files) == 1 else 'lie'} on the disk of {host}, which is no host of this run"
        for host, files in gone.items()
    ]
