"""Where a run is kept: one directory that all ranks see, or one on the disk of each host under the same path.

This is found out before anything is measured. What rank 0 alone writes of a run is on its disk; when the run goes on, and rank 0 is on
another disk than it was, these files are copied to it.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from heterodyne.api.session import Session
from heterodyne.errors import CheckpointError, HeterodyneError
from heterodyne.run_directory import RUNS, RunDirectory
from heterodyne.runtime.checkpoint.manifest import FileRecord, record
from heterodyne.runtime.comm.disks import Disks
from heterodyne.runtime.comm.parcels import Parcel, deliver

__all__ = ["open_job_run", "open_run"]

_ARRIVING = ".arriving"


def open_run(session: Session, path: Path, *, resume: bool) -> tuple[RunDirectory, Disks]:
    """Return the run directory of a loop, on every rank: a new or empty one; with ``resume`` also that of a run. Raises HeterodyneError."""
    if resume and any(session.agreement.gather_or_raise(lambda: path.is_dir() and any(path.iterdir()))):
        return _continued(session, _existing(session, path))
    return _new(session, session.agreement.on_rank0(lambda: RunDirectory.create(path)))


def open_job_run(
    session: Session, name: str, given: Path | None, *, resume: bool, restarted: bool
) -> tuple[RunDirectory, Disks]:
    """Return the run directory of a job, on every rank: ``given``, or ``runs/NAME-N`` with an N that no disk has yet, or with ``resume``
    the largest that any has. ``restarted``: there may be none to resume. Raises HeterodyneError.
    """
    last = max(session.agreement.gather_or_raise(lambda: RunDirectory.last_number(RUNS, name)))
    if resume:
        with suppress(*([CheckpointError] if restarted else [])):
            path = given or session.agreement.on_rank0(lambda: RunDirectory.numbered(RUNS, name, last))
            return _continued(session, _existing(session, path))
    return _new(
        session,
        session.agreement.on_rank0(
            lambda: RunDirectory.create_next(RUNS, name, above=last) if given is None else RunDirectory.create(given)
        ),
    )


def _existing(session: Session, path: Path) -> RunDirectory:
    """Return the run that any disk has there. Raises CheckpointError if none has."""

    def look() -> CheckpointError | None:
        try:
            RunDirectory.existing(path)
        except CheckpointError as error:
            return error
        return None

    first, *others = session.agreement.gather_or_raise(look)
    if first is not None and all(others):
        first.shared = True
        raise first
    return RunDirectory(path)


def _new(session: Session, run: RunDirectory) -> tuple[RunDirectory, Disks]:
    disks = _disks_of(session, run)

    def create() -> None:
        try:
            RunDirectory.create(run.path)
        except HeterodyneError as error:
            raise HeterodyneError(f"{error} (on {disks.told(disks.own)})") from error

    disks.on_each(create)
    return run, disks


def _continued(session: Session, run: RunDirectory) -> tuple[RunDirectory, Disks]:
    disks = _disks_of(session, run)
    with session.phase("reading the run directory"):
        _bring_to_rank0(run, disks)
    return run, disks


def _disks_of(session: Session, run: RunDirectory) -> Disks:
    disks = Disks.behind(run.path, session.agreement)
    if len(disks.ranks) > 1:
        separate = "; ".join(map(disks.told, range(len(disks.ranks))))
        session.say(
            f"the run directory {run.path} is on no disk that all hosts share ({separate}): each keeps the part of checkpoints that its "
            "ranks write"
        )
    return disks


def _bring_to_rank0(run: RunDirectory, disks: Disks) -> None:
    """Bring what rank 0 wrote before to where it is now. Raises CheckpointError."""
    records = disks.on_each(lambda: _records(run))
    newest = max(range(len(records)), key=lambda disk: max((at_s for at_s, _ in records[disk].values()), default=0.0))
    if newest == 0:
        return
    arriving = run.path / _ARRIVING

    def make() -> None:
        with suppress(OSError):  # `deliver` tells of it
            shutil.rmtree(arriving, ignore_errors=True)
            arriving.mkdir()

    def put() -> None:
        try:
            for name, (_, wanted) in records[newest].items():
                if record(arriving / name) != wanted:
                    raise CheckpointError(f"{run.path / name} has not come as it was sent; resume again")
                (arriving / name).replace(run.path / name)
        except OSError as error:
            raise CheckpointError(f"{run.path} cannot be written ({error.strerror}); make room there") from error
        finally:
            shutil.rmtree(arriving, ignore_errors=True)

    disks.agreement.only_on_rank0(make)
    parcels = [Parcel(name=name, size=of.bytes, source=newest, target=0) for name, (_, of) in records[newest].items()]
    deliver(parcels, disks, source=run.path, target=arriving)
    disks.agreement.only_on_rank0(put)


def _records(run: RunDirectory) -> dict[str, tuple[float, FileRecord]]:
    """Return what a disk has of the files that rank 0 writes, and when each was written."""
    found = {}
    for path in run.written_by_rank0:
        with suppress(OSError):
            found[path.name] = path.stat().st_mtime, record(path)
    return found
