"""Files of a checkpoint that a disk lacks and its ranks need, brought there from a disk that has them."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from heterodyne.errors import CheckpointError
from heterodyne.runtime.checkpoint.found import Checkpoint
from heterodyne.runtime.checkpoint.manifest import record
from heterodyne.runtime.checkpoint.tensor_files import SUFFIX, names_in
from heterodyne.runtime.comm.disks import Disks
from heterodyne.runtime.comm.parcels import Parcel, deliver

__all__ = ["fetch"]


def fetch(checkpoint: Checkpoint, disks: Disks, is_wanted: Callable[[str], bool]) -> Mapping[str, list[str]]:
    """Make sure that every disk has the files with tensors that its ranks want, and those that all read. Every rank calls this.

    Returns the files that this rank's disk does without, with the names of their tensors. Raises CheckpointError, on every rank, if files
    cannot be brought.
    """
    files, path = checkpoint.manifest.files, checkpoint.path
    if all(good.issuperset(files) for good in checkpoint.there):
        return {}
    parts = disks.on_each(
        lambda: {name: names_in(path / name) for name in checkpoint.there[disks.own] if name.endswith(SUFFIX)}
    )
    names = {name: tensors for of_disk in parts for name, tensors in of_disk.items()}
    lacking = [name for name in sorted(files) if name not in checkpoint.there[disks.own]]
    needed = [name for name in lacking if name not in names or any(map(is_wanted, names[name]))]
    asked = disks.agreement.gather_or_raise(lambda: needed)
    targets = {disk: sorted({name for rank in ranks for name in asked[rank]}) for disk, ranks in enumerate(disks.ranks)}
    parcels = [
        Parcel(name=name, size=files[name].bytes, source=source, target=target)
        for name in sorted(files)
        for target, wanted in targets.items()
        if name in wanted
        for source in [next(disk for disk, good in enumerate(checkpoint.there) if name in good)]
    ]
    _bring(checkpoint, parcels, disks)
    return {name: names[name] for name in lacking if name not in targets[disks.own]}


def _bring(checkpoint: Checkpoint, parcels: list[Parcel], disks: Disks) -> None:
    path, coming = checkpoint.path, [parcel.name for parcel in parcels if parcel.target == disks.own]
    partial = path.with_name(f"{path.name}.partial-{disks.agreement.on_rank0(lambda: secrets.token_hex(4))}")

    def make() -> None:
        if coming:
            try:
                partial.mkdir()
            except OSError as error:
                raise _refused(partial, error) from error

    def put() -> None:
        try:
            _put(checkpoint, partial, coming, anew=not checkpoint.there[disks.own])
        except OSError as error:
            raise _refused(path, error) from error

    try:
        disks.on_each(make)
        deliver(parcels, disks, source=path, target=partial)
        disks.on_each(put)
    finally:
        if disks.agreement.rank in disks.firsts:
            shutil.rmtree(partial, ignore_errors=True)


def _put(checkpoint: Checkpoint, partial: Path, coming: list[str], *, anew: bool) -> None:
    """Put what has come where it belongs. ``anew``: nothing of this checkpoint is on this disk yet. Raises OSError, CheckpointError."""
    path = checkpoint.path
    for name in coming:
        if record(partial / name) != checkpoint.manifest.files[name]:
            raise CheckpointError(f"{path / name} has not come as it was sent; resume again")
    if not coming:
        return
    if not anew:
        for name in coming:
            (partial / name).replace(path / name)
        return
    checkpoint.manifest.save(partial)
    if path.exists():  # what is in it belongs to no checkpoint that is whole
        path.rename(partial.with_name(f"{partial.name}0"))
    partial.rename(path)


def _refused(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be written ({error.strerror}); make room or make the directory writable, and resume again"
    )
